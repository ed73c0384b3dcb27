"""Publishing without waiting: a thread sends the newest weights; those that it did not come to are left out."""

import threading
from collections.abc import Callable

from cormorant_client.errors import ClientError
from cormorant_client.publishing import MAIN_MODEL, Body, Publishable, make_body
from cormorant_client.updates import Update

Send = Callable[[Body], Update]


class Publisher:
    """Sends weights in the background, newest wins. Thread-safe; close it, or use it as a context manager."""

    def __init__(self, send: Send, *, model: str = MAIN_MODEL) -> None:
        self._send = send
        self._model = model
        self._condition = threading.Condition()
        """Guards all below."""
        self._waiting: Body | None = None
        self._is_sending = False
        self._is_closed = False
        self._error: ClientError | None = None
        self._last: Update | None = None
        self.num_superseded = 0
        """Publishes that a newer one overtook before they were sent."""
        self._thread = threading.Thread(target=self._run, name="cormorant-publisher", daemon=True)
        self._thread.start()

    def publish(self, weights: Publishable) -> None:
        """Send these weights when the previous ones are through. Returns at once; tensors are copied first.

        Raises:
            ClientError: an earlier publish failed; this one is not sent.
            BadTensors: `weights` contains something that is not a tensor.
        """
        body = make_body(weights, model=self._model).copied()
        with self._condition:
            self._raise_error()
            if self._is_closed:
                raise ClientError("the publisher is closed; create a new one")
            self.num_superseded += self._waiting is not None
            self._waiting = body
            self._condition.notify_all()

    @property
    def last(self) -> Update | None:
        """The newest publish that the head has."""
        return self._last

    @property
    def version(self) -> int:
        """Its version; 0 while there is none."""
        return self._last.version if self._last is not None else 0

    def flush(self, timeout_s: float = 60.0) -> Update | None:
        """Wait until the head has what was published, and return it.

        Raises:
            ClientError: it failed, or takes too long.
        """
        with self._condition:
            done = self._condition.wait_for(
                lambda: self._error is not None or not (self._waiting or self._is_sending), timeout=timeout_s
            )
            self._raise_error()
            if not done:
                raise ClientError(f"the head did not receive the weights within {timeout_s:g} s; increase the timeout")
            return self._last

    def close(self, timeout_s: float = 60.0) -> None:
        """Send pending weights and stop. Idempotent.

        Raises:
            ClientError: what waited could not be sent.
        """
        try:
            if not self._is_closed:
                self.flush(timeout_s)
        finally:
            with self._condition:
                self._is_closed = True
                self._condition.notify_all()
            self._thread.join(timeout_s)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        """Send what waits, and end."""
        self.close()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._condition:
                while self._waiting is None:
                    if self._is_closed:
                        return
                    self._condition.wait()
                body, self._waiting = self._waiting, None
                self._is_sending = True
            update, failed = self._try(body)
            with self._condition:
                self._is_sending = False
                self._last = update or self._last
                self._error = failed
                self._condition.notify_all()

    def _try(self, body: Body) -> tuple[Update | None, ClientError | None]:
        try:
            return self._send(body), None
        except ClientError as error:
            return None, error
        except Exception as error:  # noqa: BLE001  # the edge of a thread: the next publish tells
            failed = ClientError(f"publishing failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            return None, failed
