"""Wakes coroutines of any event loop from any thread, and keeps the newest items of a stream for listeners that read at
their own pace; one that falls behind is dropped.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from cormorant_api.errors import ApiError
from cormorant_contract.rest.live import Event
from cormorant_contract.rest.problems import ProblemType

Found = TypeVar("Found")
Item = TypeVar("Item")


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
                result = look()
                left = deadline - time.monotonic()
                if result or left <= 0:
                    return result
                await asyncio.wait((future,), timeout=left)
            finally:
                with self._lock:
                    self._waiting.discard(future)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Ring(Generic[Item]):
    """The last items by position, from 0. Thread-safe."""

    def __init__(self, capacity: int, *, most_listeners: int) -> None:
        self.notifier = AsyncNotifier()
        """Notified at every item."""
        self.listeners = 0
        self.end = 0
        """Position after the newest item."""
        self._most_listeners = most_listeners
        self._guard = threading.Lock()
        """Guards the items, `end` and `listeners`."""
        self._items: deque[Item] = deque(maxlen=capacity)

    def append(self, make: Callable[[int], Item]) -> None:
        """Add what `make` returns for its position."""
        with self._guard:
            self._items.append(make(self.end))
            self.end += 1
        self.notifier.notify()

    @property
    def begin(self) -> int:
        """Position of the oldest item."""
        return self.end - len(self._items)

    def read(self, position: int, most: int = 256) -> tuple[list[Item], int] | None:
        """Items from a position on, and the next position; None if some were already dropped."""
        with self._guard:
            first = position - self.begin
            if first < 0:
                return None
            items = [self._items[i] for i in range(first, min(len(self._items), first + most))]
            return items, position + len(items)

    def enter(self) -> None:
        """Admit a listener; 429 if there are too many."""
        with self._guard:
            if self.listeners >= self._most_listeners:
                raise ApiError(
                    ProblemType.BUSY,
                    f"{self.listeners} streams like this one are open, the limit; close some of them",
                    retry_after_s=5,
                )
            self.listeners += 1

    def leave(self) -> None:
        with self._guard:
            self.listeners -= 1


class EventRing(Ring[Event]):
    """The last events of this head, for `GET /v1/events`."""

    def __init__(self, *, epoch: str, capacity: int = 4096) -> None:
        super().__init__(capacity, most_listeners=64)
        self._epoch = epoch

    def add(self, kind: str, **fields: Any) -> None:
        self.append(lambda number: Event(id=f"{self._epoch}-{number}", kind=kind, time=datetime.now(UTC), **fields))

    def position_after(self, last_event_id: str) -> int:
        """Position after an event id; the oldest retained event for an unknown id."""
        epoch, _, digits = last_event_id.rpartition("-")
        if epoch != self._epoch or not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            return self.begin
        return min(max(self.begin, int(digits) + 1), self.end)
