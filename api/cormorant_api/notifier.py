"""Wakes coroutines of any event loop, from any thread: what long polls wait on."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class AsyncNotifier:
    """Rung whenever something changed; waiters look again. Holds no state but who waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_waiting`."""
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake everybody. May be called from any thread, and with other locks held."""
        with self._lock:
            woken, self._waiting = self._waiting, set()
        for future in woken:
            try:
                future.get_loop().call_soon_threadsafe(_wake, future)
            except RuntimeError:
                continue  # its loop has ended, and the waiter with it

    async def wait_for(self, look: Callable[[], Found], *, timeout_s: float) -> Found:
        """Look at every ring until there is something to see, or time is up.

        Args:
            look: called on this event loop; must not block. Anything true ends the wait.
            timeout_s: how long to wait at most.

        Returns:
            What `look` said last: false when the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with self._lock:
                self._waiting.add(future)
            try:
                # After joining: what changes from here on rings.
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
