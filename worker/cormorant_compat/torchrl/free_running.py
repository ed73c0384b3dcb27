"""A collector that fills its replay buffer by itself: `start` and `pause`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cormorant_worker.errors import ControlTimeout, FleetClosed


class FreeRunning:
    """A thread that collects batch by batch until it is told to stop, or nothing is left."""

    def __init__(self, collect: Callable[[], object]) -> None:
        """Begin. `collect` collects one batch, and returns None when nothing is left."""
        self._collect = collect
        self._changed = threading.Condition()
        """Guards everything here."""
        self._is_wanted = True
        self._holds = 0
        """Number of callers that hold it paused."""
        self._is_collecting = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True until it was stopped, or nothing is left."""
        return self._thread.is_alive()

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Inside, it collects nothing; it goes on afterwards, whatever happens inside."""
        with self._changed:
            self._holds += 1
            if not self._changed.wait_for(lambda: not self._is_collecting, timeout_s):
                self._holds -= 1
                self._changed.notify_all()
                raise ControlTimeout(f"the batch under way did not end within {timeout_s:g} s; the collector goes on")
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def stop(self, timeout_s: float) -> BaseException | None:
        """Stop after the current batch, at most `timeout_s` from now. Returns the error that ended it, if any."""
        with self._changed:
            self._is_wanted = False
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return self._error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: not self._is_wanted or not self._holds)
                    if not self._is_wanted:
                        return
                    self._is_collecting = True
                try:
                    batch = self._collect()
                finally:
                    with self._changed:
                        self._is_collecting = False
                        self._changed.notify_all()
                if batch is None:
                    return
        except FleetClosed:
            return
        except BaseException as error:  # noqa: BLE001  # the thread's edge: `stop` returns it
            self._error = error
