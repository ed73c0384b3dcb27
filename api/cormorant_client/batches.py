"""Batches as an iterator: fetched ahead by a thread, acknowledged when the next one is asked for.

fetched -> ready -> handed out -> acknowledged (the next one was asked for, or the block ended well)
              |          +------> released (the block ended with an error, or was closed): delivered again at once
              +-----------------> released
a process that dies does neither: the head delivers its batches again after their acknowledgement time limit
"""

import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Literal, Self, TypedDict, TypeVar

from cormorant_client.delivery import Delivery, Mappings, NotHere, decode, decode_memory
from cormorant_client.errors import BatchTimeout, ClientClosed, ClientError, NotFound, StreamEnded
from cormorant_client.head import HeadConnection, Params, default_owner, quoted
from cormorant_client.transport import HttpReply
from cormorant_contract.rest import base as headers
from cormorant_contract.rest.batches import MemoryBatch

MemoryUse = Literal["auto", "never"]
T = TypeVar("T")

_POLL_S = 20.0
_REMEMBERED = 1024
_FRESH = 0.5
"""Share of the acknowledgement time limit after which a prefetched batch is released instead of handed out."""
_GIVE_BACK_S = 2.0


class StreamOptions(TypedDict, total=False):
    """Keyword arguments of an iteration over batches."""

    frames: int | None
    """End after at least this many frames; None, the default: when the stream ends."""
    consumer: str
    """Name of this consumer in the head's status; by default host and process. Consumers share the stream."""
    prefetch: int
    """Batches fetched ahead, 2 by default. 0 for strictly on-policy learning with several consumers."""
    max_staleness: int | None
    """Drop batches whose oldest version lags the newest by more than this; None, the default: drop none."""
    memory: MemoryUse
    """auto, the default: map the head's memory if it is on this machine. never: transfer the bytes of the batch."""


class RemoteBatches(Generic[T]):
    """Iterator of batches and context manager. Only one thread may iterate."""

    def __init__(self, head: HeadConnection, wanted: StreamOptions, read: Callable[[Delivery], T]) -> None:
        self._fetcher = _Fetcher(head, **wanted)
        self._read = read
        # The thread references only the fetcher: garbage collection of an abandoned iterator stops it.
        self._end = weakref.finalize(self, self._fetcher.stop)
        self.num_frames = 0
        """Frames handed out so far."""

    def next(self, timeout: float | None = None) -> T | None:
        """Acknowledge the last batch and wait for the next; None when the stream ended, or `frames` were delivered.

        Raises:
            BatchTimeout: none arrived within `timeout` seconds; the next call continues to wait.
            HeadUnreachable: the head was unreachable for longer than `reconnect_s`.
            HeadError: the head refused, for example because of the token.
        """
        if (current := self._fetcher.take_current()) is not None:
            current.ack()
        if (delivery := self._fetcher.take(timeout)) is None:
            return None
        self.num_frames += delivery.num_frames
        return self._read(delivery)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if (batch := self.next()) is None:
            raise StopIteration
        return batch

    def close(self) -> None:
        """Release unacknowledged batches and stop fetching. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Acknowledge the last batch unless an error occurred, and close."""
        last = self._fetcher.take_current() if kind is None else None
        self.close()
        if last is not None:
            # Acknowledge last: the head would send the next batch to a request that is being aborted.
            last.ack()


class _Fetcher:
    """Fetches ahead in a thread, and tracks the batches that the head lent."""

    def __init__(
        self,
        head: HeadConnection,
        *,
        frames: int | None = None,
        consumer: str = "",
        prefetch: int = 2,
        max_staleness: int | None = None,
        memory: MemoryUse = "auto",
    ) -> None:
        self._head = head
        self._fetching = head.twin()
        """Closed by `stop`, which aborts a waiting request."""
        self._frames, self._prefetch = frames, max(0, prefetch)
        self._asking: Params = {
            "consumer": consumer or default_owner(),
            "wait": _POLL_S,
            "max_staleness": max_staleness,
        }
        self._condition = threading.Condition()
        """Guards the fields below, up to the thread."""
        self._ready: deque[tuple[Delivery, float]] = deque()
        """Batches, each with the time at which it becomes too old to be handed out."""
        self._asked = 0
        """1 while the caller waits for a batch."""
        self._frames_fetched = 0
        self._head_id = ""
        """Names the head that sent the last batch: the first part of the batch's id."""
        self._end: ClientError | Literal["done"] | None = None
        self._current: Delivery | None = None
        self._acked: deque[str] = deque(maxlen=_REMEMBERED)
        self._uses_memory = memory == "auto" and head.address.is_loopback
        self._mappings: Mappings | None = None
        self._thread = threading.Thread(target=self._fetch_all, name="cormorant-batches", daemon=True)
        self._thread.start()

    @property
    def _is_stopped(self) -> bool:
        return self._fetching.transport.closed.is_set()

    def take(self, timeout: float | None) -> Delivery | None:
        """Wait for the next batch; None at the end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (ready := self._next_ready(deadline, timeout)) is not None:
            batch, stale_at = ready
            if batch.id in self._acked:
                # It was acknowledged late, after the head had delivered it again.
                batch.ack()
            else:
                with self._condition:
                    if time.monotonic() < stale_at and not self._is_stopped:
                        self._current = batch
                        return batch
                self._release(batch)
            with self._condition:
                self._frames_fetched -= batch.num_frames
                self._condition.notify_all()
        return None

    def take_current(self) -> Delivery | None:
        """Take over the batch that was handed out last: `stop` does not release it then."""
        current, self._current = self._current, None
        return current

    def stop(self) -> None:
        """Release all batches and end the thread."""
        self._finish("done")
        # A response in flight names a batch that must be released: keep reading it.
        self._fetching.close(socket.SHUT_WR)
        with self._condition:
            self._condition.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_GIVE_BACK_S)
            self._fetching.close()
            self._thread.join()
        with self._condition:
            left = [self.take_current(), *(batch for batch, _ in self._ready)]
            self._ready.clear()
        for batch in left:
            if batch is not None and not batch.is_acked:
                self._release(batch)

    def _next_ready(self, deadline: float | None, timeout: float | None) -> tuple[Delivery, float] | None:
        with self._condition:
            self._asked = 1
            self._condition.notify_all()
            try:
                left = None if deadline is None else deadline - time.monotonic()
                if not self._condition.wait_for(lambda: self._ready or self._end, left):
                    raise BatchTimeout(
                        f"no batch came from {self._head.address} within {timeout:g} s; wait "
                        "longer, or look at the job's status: it says what the fleet waits for"
                    )
                if not self._ready and isinstance(self._end, ClientError):
                    raise self._end
                return self._ready.popleft() if self._ready else None
            finally:
                self._asked = 0
                self._condition.notify_all()

    def _ack(self, batch: Delivery) -> None:
        self._acked.append(batch.id)
        with suppress(NotFound):  # its head is gone
            reply = self._head.post(f"/v1/batches/{quoted(batch.id)}/ack")
            if receipt := reply.headers.get(headers.SETTLED):
                self._head.receipts[headers.SETTLED] = receipt

    def _release(self, batch: Delivery) -> None:
        batch.forget()
        with suppress(ClientError):  # the head takes it back when its time limit expires
            path = f"/v1/batches/{quoted(batch.id)}/release?delivery={batch.delivery}"
            self._head.post(path, patience_s=_GIVE_BACK_S)

    def _fetch_all(self) -> None:
        try:
            while self._may_fetch():
                fetched = self._fetch()
                if fetched is None:
                    continue
                batch, _ = fetched
                before, self._head_id = self._head_id, batch.id.rpartition("-")[0]
                with self._condition:
                    is_first_of_another_head = before not in ("", self._head_id)
                    # The caller may have made weights of the earlier head's batches while this one was collected, which
                    # its head did not know of: release it once the caller asks and has none of those left.
                    while is_first_of_another_head and not self._is_stopped and (self._ready or not self._asked):
                        self._condition.wait()
                    if not is_first_of_another_head:
                        self._ready.append(fetched)
                        self._frames_fetched += batch.num_frames
                        self._condition.notify_all()
                if is_first_of_another_head:
                    self._release(batch)
            # The client was closed, unless `stop` ended the iteration before.
            self._finish(ClientClosed() if self._is_stopped else "done")
        except StreamEnded:
            self._finish("done")
        except ClientError as error:
            self._finish(error)
        except Exception as error:  # noqa: BLE001  # the edge of a thread: the iterating thread raises it
            failed = ClientError(f"fetching batches failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self._finish(failed)

    def _may_fetch(self) -> bool:
        """Wait for room; False when nothing is left to fetch."""
        with self._condition:
            while not self._is_stopped:
                has_enough = self._frames is not None and self._frames_fetched >= self._frames
                if has_enough and self._asked and not self._ready:
                    return False
                if not has_enough and len(self._ready) < self._prefetch + self._asked:
                    return True
                self._condition.wait()
            return False

    def _finish(self, end: ClientError | Literal["done"]) -> None:
        """End the iteration; the first end counts."""
        with self._condition:
            self._end = self._end or end
            self._condition.notify_all()

    def _fetch(self) -> tuple[Delivery, float] | None:
        accept = f"{headers.MEMORY_JSON}, {headers.SAFETENSORS}" if self._uses_memory else headers.SAFETENSORS
        reply = self._fetching.send(
            "GET",
            "/v1/batches/next",
            params=self._asking,
            headers={"Accept": accept, **self._head.receipts},
            wait_s=_POLL_S,
            is_bulk=True,
        )
        at = time.monotonic()
        if reply.status == 204:
            return None
        is_memory = reply.headers.get("content-type", "").startswith(headers.MEMORY_JSON)
        batch = self._map(reply) if is_memory else decode(reply.body, on_ack=self._ack)
        within_s = float(reply.headers.get(headers.ACK_WITHIN, "60"))
        return None if batch is None else (batch, at + _FRESH * within_s)

    def _map(self, reply: HttpReply) -> Delivery | None:
        told = self._head.parse(MemoryBatch, reply)
        self._mappings = self._mappings or Mappings(self._fetching)
        try:
            batch = decode_memory(told, self._mappings, on_ack=self._ack)
        except NotHere:
            # A head that was killed in between has forgotten the batch; its successor's memory may be accessible.
            with suppress(NotFound):
                self._head.post(f"/v1/batches/{quoted(told.id)}/release?delivery={told.delivery}")
                self._uses_memory = False  # the head delivers the same batch again, as bytes
            return None
        if time.monotonic() - told.lent_at >= told.ack_within_s:
            batch.forget()  # the head may have taken it back before it was locked, and delivers it again
            return None
        return batch
