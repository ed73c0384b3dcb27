"""A queue of keys with due times: each key once, never with two workers at a time, with backoff after failures.

add -> waiting -> ready -> taken -> done            (added meanwhile: waiting again)
                                 -> failed          (waiting again after 0.5 s, 1 s, 2 s ... 5 min)
"""

import asyncio
import math
import random

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 300.0


class WorkQueue:
    """A queue of keys with due times. Belongs to one event loop."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        """Keys that wait or are ready, and their due times by the loop's clock; authoritative."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Timers of waiting keys that are not due, and that no worker holds."""
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        """Due keys; may contain keys that were forgotten or taken since, or that wait again."""
        self._taken: set[str] = set()
        self._failures: dict[str, int] = {}

    @property
    def num_due(self) -> int:
        """Number of due keys that no worker has taken."""
        now = _now()
        return sum(due <= now for due in self._due.values())

    @property
    def longest_wait_s(self) -> float:
        """How long the first due key has waited for a worker."""
        return max(0.0, _now() - min(self._due.values(), default=math.inf))

    def add(self, key: str, *, after_s: float = 0.0) -> None:
        """Queue a key, due in `after_s`; an earlier due time is kept."""
        due = _now() + max(0.0, after_s)
        if due < self._due.get(key, math.inf):
            self._due[key] = due
            self._set_timer(key)

    def forget(self, key: str) -> None:
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._set_timer(key)

    async def take(self) -> str:
        """Wait for a due key that no other worker holds. Call `done` or `failed` afterwards."""
        while True:
            key = await self._ready.get()
            if key in self._due and key not in self._taken and key not in self._timers:
                del self._due[key]
                self._taken.add(key)
                return key

    def done(self, key: str) -> None:
        self._failures.pop(key, None)
        self._taken.discard(key)
        self._set_timer(key)

    def failed(self, key: str) -> float:
        """Queue the key again with backoff. Returns the delay in seconds."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(count - 1, 20)) * random.uniform(0.5, 1.5)
        # An `add` in the meantime must not bypass the delay.
        self._due[key] = _now() + delay_s
        self._taken.discard(key)
        self._set_timer(key)
        return delay_s

    def _set_timer(self, key: str) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._due and key not in self._taken:
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_at(self._due[key], self._make_ready, key)

    def _make_ready(self, key: str) -> None:
        del self._timers[key]
        self._ready.put_nowait(key)


def _now() -> float:
    return asyncio.get_running_loop().time()
