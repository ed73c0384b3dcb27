"""A budget of requests: so many a second, and some more at once after a pause. For one event loop."""

import asyncio
from collections.abc import Callable


class Pace:
    """A bucket of tokens; `wait` takes one, and waits for it when there is none."""

    def __init__(self, *, rate: float, burst: int, clock: Callable[[], float] | None = None) -> None:
        """Begin with a full bucket.

        Args:
            rate: tokens a second.
            burst: tokens that it holds at most.
            clock: monotonic seconds; the event loop's by default.
        """
        self._rate, self._burst = rate, float(burst)
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._tokens = float(burst)
        self._at: float | None = None

    def take(self) -> float:
        """Take a token. Returns the seconds after which it may be used: later takers wait longer."""
        now = self._clock()
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)

    async def wait(self) -> None:
        """Take a token and wait until it may be used."""
        delay_s = self.take()
        if delay_s:
            await asyncio.sleep(delay_s)
