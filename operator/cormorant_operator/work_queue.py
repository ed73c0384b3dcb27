"""A queue of keys with due times: each key once, never with two workers at a time, with backoff after failures.

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
        """`clock`: by default the event loop's. `jitter`: factor of a failure's delay, by default from 0.5 to 1.5."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._jitter = jitter or (lambda: random.uniform(0.5, 1.5))
        self._due: dict[str, float] = {}
        """Waiting keys and their due times; authoritative."""
        self._heap: list[tuple[float, int, str]] = []
        """The same, ordered; may contain outdated entries."""
        self._order = itertools.count()
        self._taken: set[str] = set()
        self._failures: dict[str, int] = {}
        self._takers: deque[asyncio.Future[str]] = deque()
        """Workers that wait for a key, in FIFO order."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires for the next due key while a worker waits."""
        self._waits: dict[int, float] = {}
        """Longest delay of a key, by minute; the current and the previous one."""

    @property
    def num_due(self) -> int:
        """Number of due keys that no worker has taken."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    @property
    def longest_wait_s(self) -> float:
        """Longest delay of a key within the last one to two minutes."""
        minute = int(self._clock() // _MINUTE_S)
        return max((wait_s for at, wait_s in self._waits.items() if at >= minute - 1), default=0.0)

    def add(self, key: str, *, after_s: float = 0.0) -> None:
        """Queue a key, due in `after_s`; an earlier due time is kept."""
        due = self._clock() + max(0.0, after_s)
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key))
        self._hand_out()

    def forget(self, key: str) -> None:
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def take(self) -> str:
        """Wait for a due key that no other worker holds. Call `done` or `failed` afterwards."""
        taker: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        self._hand_out()
        try:
            return await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled():
                # It got a key but will not process it.
                self._taken.discard(taker.result())
                self.add(taker.result())
            raise

    def done(self, key: str) -> None:
        self._failures.pop(key, None)
        self._give_back(key)

    def failed(self, key: str) -> float:
        """Queue the key again with backoff. Returns the delay in seconds."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(count - 1, 20)) * self._jitter()
        # An `add` in the meantime must not bypass the delay.
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
        """Hand due keys to waiting workers; each key wakes exactly one."""
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
            # Outdated, or the key is taken and comes back with `done`.
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
