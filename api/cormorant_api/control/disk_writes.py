"""Small writes to the head's directory that requests wait for: one at a time, in their order, by a thread of their own.

A disk that does not answer holds up this thread alone. Requests wait for a limited time, and a limited number of them.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from cormorant_api.errors import StoreError

T = TypeVar("T")
_MOST_WAITING = 16


class DiskWrites:
    """Used by the event loops of both ports."""

    def __init__(self) -> None:
        self.within_s = 10.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._waiting = 0
        self._lock = threading.Lock()
        """Guards `_waiting`."""

    async def write(self, what: str, call: Callable[[], T]) -> T:
        """Run a call that writes.

        Args:
            what: what it writes, for messages.

        Raises:
            StoreError: the disk does not answer, or too many writes wait for it.
        """
        asked: Future[T] = Future()

        def run() -> None:
            self._count(-1)
            if asked.set_running_or_notify_cancel():
                try:
                    asked.set_result(call())
                except BaseException as error:  # noqa: BLE001  # raised where it is waited for
                    asked.set_exception(error)

        if self._count(1) > _MOST_WAITING:
            self._count(-1)
            raise StoreError(f"{_MOST_WAITING} writes already wait for the disk; {what} was not changed; retry")
        try:
            self._writer.submit(run)
        except RuntimeError:
            raise StoreError(f"the head is shutting down; {what} was not changed; retry with the next head") from None
        try:
            async with asyncio.timeout(self.within_s):
                return await asyncio.wrap_future(asked)
        except TimeoutError:
            became = "may still be changed" if asked.running() else "was not changed"
            raise StoreError(f"the disk did not answer within {self.within_s:.0f} s; {what} {became}; retry") from None

    def close(self) -> None:
        self._writer.shutdown(wait=False)

    def _count(self, change: int) -> int:
        with self._lock:
            self._waiting += change
            return self._waiting
