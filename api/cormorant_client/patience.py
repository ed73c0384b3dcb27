"""How long to go on trying, and how to wait in between. Why not stamina: docs/decisions/0034."""

import random
import threading
import time

_FIRST_S = 0.1
_LONGEST_S = 3.0


class Patience:
    """A budget of time for one thing that may be tried again. Waits grow from 0.1 to 3 s, each with full jitter."""

    def __init__(self, total_s: float) -> None:
        self._began = time.monotonic()
        self._until = self._began + total_s
        self._next_s = _FIRST_S
        self.total_s = total_s

    def extend(self, total_s: float) -> None:
        """There is reason to try for longer: so long since the first try."""
        self._until = max(self._until, self._began + total_s)
        self.total_s = max(self.total_s, total_s)

    @property
    def spent_s(self) -> float:
        """Seconds since the first try."""
        return time.monotonic() - self._began

    def wait(self, *, at_least_s: float = 0.0, interrupted: threading.Event | None = None) -> bool:
        """Sleep before the next try. False when the time is used up or it was interrupted: give up then."""
        left = self._until - time.monotonic()
        seconds = max(at_least_s, random.uniform(0.5, 1.0) * self._next_s)
        self._next_s = min(_LONGEST_S, 2 * self._next_s)
        if left <= 0:
            return False
        if interrupted is None:
            time.sleep(min(seconds, left))
            return True
        return not interrupted.wait(min(seconds, left))
