"""Wakes coroutines of any event loop from any thread; long polls wait on it."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class AsyncNotifier:
    """A condition for coroutines: waiters check their predicate again after every `notify`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_waiting`."""
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake all waiters. May be called from any thread and with other locks held."""
        with self._lock:
            woken, self._waiting = self._waiting, set()
        for future in woken:
            try:
                future.get_loop().call_soon_threadsafe(_wake, future)
            except RuntimeError:
                continue  # its event loop has ended

    async def wait_for(self, look: Callable[[], Found], *, timeout_s: float) -> Found:
        """Call `look` now and after every `notify` until it returns something true, on this event loop, which it must
        not block. Returns its last result; false after a timeout.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with self._lock:
                self._waiting.add(future)
            try:
                # Look after registering, so that no notification is missed.
                found = look()
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                await asyncio.wait((future,), timeout=left)
            finally:
                with self._lock:
                    self._waiting.discard(future)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
