"""The budget of requests to the API server: so many a second, and a burst after a pause. For one event loop.

Requests that wait are served by deadline, and each purpose has its patience: a pod goes before a condition, a condition
before counters, counters before upkeep, and none of them waits for ever behind the others. How many of each wait at one
time is bounded by the tasks that send them, so a late one delays the others by a few requests, not by a queue.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum


class Purpose(Enum):
    """What a request is for, and the seconds that it may wait while others are served."""

    LEASE = -60.0
    """The lease is lost when its renewal waits: it goes first."""
    PODS = 0.0
    """What jobs run on: pods, and what pods need."""
    STATUS = 1.0
    """Conditions, phases and events."""
    COUNTERS = 5.0
    """A status of which only counters are new."""
    UPKEEP = 10.0
    """Full lists."""


_purpose: ContextVar[Purpose] = ContextVar("purpose", default=Purpose.PODS)


@contextmanager
def purpose(of: Purpose) -> Iterator[None]:
    """Requests that are sent inside, by this task, have this purpose; all others are for pods."""
    token = _purpose.set(of)
    try:
        yield
    finally:
        _purpose.reset(token)


class RateLimiter:
    """A bucket of tokens, one a request."""

    def __init__(self, *, rate: float, burst: int, clock: Callable[[], float] | None = None) -> None:
        """Begin with a full bucket.

        Args:
            rate: tokens a second.
            burst: tokens that it holds at most.
            clock: monotonic seconds; the event loop's by default.
        """
        self._rate = rate
        self._burst = self._tokens = float(burst)
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._at: float | None = None
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        """A heap by deadline."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        """Take a token, and wait for it when there is none."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self._clock() + _purpose.get().value, next(self._order), turn))
        self.hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was given a token, and sends nothing.
                self._tokens += 1
                self.hand_out()
            raise

    def hand_out(self) -> None:
        """Let those send whose turn it is."""
        now = self._clock()
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        # A bucket that is filled in fractions may lack a last bit of one.
        while self._waiting and self._tokens > 1 - 1e-9:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._tokens -= 1
                turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            wait_s = (1 - self._tokens) / self._rate
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.hand_out)
