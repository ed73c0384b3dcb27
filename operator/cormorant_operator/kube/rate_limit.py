"""Rate limit of requests to the API server: a token bucket with priorities. For one event loop.

Waiting requests are served by deadline, and each purpose adds its own delay: pods go before conditions, conditions
before counters, counters before resyncs, and none starves. The number of tasks bounds how many requests wait at a time,
so one overdue request delays the others by a few requests only.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum


class Purpose(Enum):
    """Purpose of a request; the value is the delay of its deadline in seconds."""

    LEASE = -60.0
    """A late renewal loses the lease, so it goes first."""
    PODS = 0.0
    """Pods, and objects that pods need."""
    STATUS = 1.0
    """Conditions, phases and events."""
    COUNTERS = 5.0
    """Counter-only status writes."""
    UPKEEP = 10.0
    """Resyncs."""


_purpose: ContextVar[Purpose] = ContextVar("purpose", default=Purpose.PODS)


@contextmanager
def purpose(of: Purpose) -> Iterator[None]:
    """Set the purpose of requests that this task sends inside the block (default: PODS)."""
    token = _purpose.set(of)
    try:
        yield
    finally:
        _purpose.reset(token)


class RateLimiter:
    """A token bucket; each request takes one token."""

    def __init__(self, *, rate: float, burst: int, clock: Callable[[], float] | None = None) -> None:
        """Start with a full bucket of `burst` tokens; it gains `rate` tokens per second. `clock`: by default the event
        loop's.
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
        """Take a token; waits if there is none."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self._clock() + _purpose.get().value, next(self._order), turn))
        self.hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # A cancelled request got a token: pass it on.
                self._tokens += 1
                self.hand_out()
            raise

    def hand_out(self) -> None:
        """Release as many waiting requests as there are tokens."""
        now = self._clock()
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        # Refilling in fractions may fall short by a rounding error.
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
