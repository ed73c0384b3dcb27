"""The last events, for `GET /v1/events`. Listeners read at their own pace; one that falls behind is dropped."""

import threading
from collections import deque
from datetime import UTC, datetime
from typing import Any

from cormorant_api.notifier import AsyncNotifier
from cormorant_contract.rest.events import Event

CAPACITY = 4096
MOST_LISTENERS = 64


class EventRing:
    """The newest events of this head. Thread-safe."""

    def __init__(self, *, epoch: str, capacity: int = CAPACITY) -> None:
        self.notifier = AsyncNotifier()
        self.listeners = 0
        self.dropped_listeners = 0
        self._epoch = epoch
        self._lock = threading.Lock()
        """Guards `_events`, `_next` and the listener counts."""
        self._events: deque[Event] = deque(maxlen=capacity)
        self._next = 0

    def add(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._events.append(Event(id=f"{self._epoch}-{self._next}", kind=kind, time=datetime.now(UTC), **fields))
            self._next += 1
        self.notifier.notify()

    @property
    def end(self) -> int:
        """Position after the newest event."""
        return self._next

    def position_after(self, last_event_id: str) -> int:
        """Position after an event id; the oldest retained event for an unknown id."""
        epoch, _, digits = last_event_id.rpartition("-")
        if epoch != self._epoch or not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            return self._begin
        return min(max(self._begin, int(digits) + 1), self._next)

    def read(self, position: int, most: int = 256) -> tuple[list[Event], int] | None:
        """Events from a position on, and the next position; None if some were already dropped."""
        with self._lock:
            begin = self._begin
            if position < begin:
                return None
            found = [self._events[i] for i in range(position - begin, min(len(self._events), position - begin + most))]
            return found, position + len(found)

    def enter(self) -> bool:
        """Admit a listener; False if there are too many."""
        with self._lock:
            if self.listeners >= MOST_LISTENERS:
                return False
            self.listeners += 1
            return True

    def leave(self, *, was_slow: bool = False) -> None:
        with self._lock:
            self.listeners -= 1
            self.dropped_listeners += was_slow

    @property
    def _begin(self) -> int:
        return self._next - len(self._events)
