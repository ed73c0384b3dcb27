"""Keys to look at, now or at a time: each once, none by two workers at a time, and later after each failure in a row.

add -> waiting -> taken -> done            (added meanwhile: waiting again)
-> failed          (waiting again after 0.5 s, 1 s, 2 s ... 5 min)
"""

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

_MINUTE_S = 60.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 300.0


class WorkQueue:
    """A queue of keys with due times. Belongs to one event loop."""

    def __init__(self, *, clock: Callable[[], float] | None = None, jitter: Callable[[], float] | None = None) -> None:
        """Begin empty.

        Args:
            clock: monotonic seconds; the event loop's by default.
            jitter: factor of a failure's delay; 0.5 to 1.5 by default.
        """
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._jitter = jitter or (lambda: random.uniform(0.5, 1.5))
        self._due: dict[str, float] = {}
        """Waiting keys and when each is due: the truth."""
        self._heap: list[tuple[float, int, str]] = []
        """The same in order, with entries that are out of date."""
        self._order = itertools.count()
        self._taken: set[str] = set()
        self._failures: dict[str, int] = {}
        self._takers: deque[asyncio.Future[str]] = deque()
        """Workers that wait for a key, the first to come first."""
        self._timer: asyncio.TimerHandle | None = None
        """For the next key that is due, while somebody waits."""
        self._waits: dict[int, float] = {}
        """How late a key was at most, by minute: this one and the last."""

    def __len__(self) -> int:
        """Keys that wait, due or not."""
        return len(self._due)

    @property
    def num_due(self) -> int:
        """Keys that are due and not taken yet."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    @property
    def longest_wait_s(self) -> float:
        """How late a key was taken at most, within the last minute or two."""
        minute = int(self._clock() // _MINUTE_S)
        return max((wait_s for at, wait_s in self._waits.items() if at >= minute - 1), default=0.0)

    def add(self, key: str, *, after_s: float = 0.0) -> None:
        """Look at a key, at the latest after so long; an earlier time that it waits for holds."""
        due = self._clock() + max(0.0, after_s)
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._hand_out()

    def forget(self, key: str) -> None:
        """Do not look at a key any more."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def take(self) -> str:
        """Wait for a key that is due and that nobody else works on. `done` or `failed` must follow."""
        taker: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        self._hand_out()
        try:
            return await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled():
                # It was given a key, and will never work on it.
                self._taken.discard(taker.result())
                self.add(taker.result())
            raise

    def done(self, key: str) -> None:
        self._failures.pop(key, None)
        self._give_back(key)

    def failed(self, key: str) -> float:
        """It did not: look again later. Returns after how many seconds."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(count - 1, 20)) * self._jitter()
        # What was added meanwhile must not get around the delay.
        self._due.pop(key, None)
        self._give_back(key)
        self.add(key, after_s=delay_s)
        return delay_s

    def _give_back(self, key: str) -> None:
        self._taken.discard(key)
        if key in self._due:
            heapq.heappush(self._heap, (self._due[key], next(self._order), key))
            self._hand_out()

    def _hand_out(self) -> None:
        """Give what is due to those who wait: one key wakes one of them, and nobody is woken for nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._takers:
            if self._takers[0].done():
                self._takers.popleft()  # it was cancelled
                continue
            key, wait_s = self._next()
            if key is not None:
                self._takers.popleft().set_result(key)
                continue
            if wait_s is not None:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._hand_out)
            return

    def _next(self) -> tuple[str | None, float | None]:
        now = self._clock()
        while self._heap:
            due, _, key = self._heap[0]
            # Out of date, or of a key that comes back with `done`.
            if self._due.get(key) != due or key in self._taken:
                heapq.heappop(self._heap)
                continue
            if due > now:
                return None, due - now
            heapq.heappop(self._heap)
            del self._due[key]
            self._taken.add(key)
            self._note_wait(now, now - due)
            return key, None
        return None, None

    def _note_wait(self, now: float, wait_s: float) -> None:
        minute = int(now // _MINUTE_S)
        if minute not in self._waits:
            self._waits = {at: longest for at, longest in self._waits.items() if at == minute - 1} | {minute: 0.0}
        self._waits[minute] = max(self._waits[minute], wait_s)
