"""How often environments may be restarted, and the seeds of those that are."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from cormorant_worker.envs.env_row import Crash
from cormorant_worker.errors import EnvCrashed, EnvRaised

log = structlog.get_logger(__name__)

ENV_RESTARTED = "env_restarted"
"""The log line of a restart, which fleets count."""
RESTART_WINDOW_S = 600.0
"""Seconds for which a restart counts."""
_TOLD = 3
"""Restarts that are logged with their traceback; later ones are one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """When to give up on environments that crash or hang."""

    total: int = 100
    """Restarts over all environments of one VectorEnv, within RESTART_WINDOW_S."""
    inherited: int = 0
    """Restarts by earlier workers of its slot."""
    barren: int = 3
    """Restarts in a row of one environment that does not complete a step in between."""
    recycle_rss_mib: int = 0
    """A subprocess that has more resident memory at the end of an episode is replaced; 0: none is."""
    recycle_episodes: int = 0
    """A subprocess that has played so many episodes is replaced; 0: none is."""
    raises: bool = False
    """An environment that raises is not restarted: its exception ends the collection. One that hangs or dies is."""


class Restarts:
    """Counts the restarts of one VectorEnv and hands out seeds that none of its environments had before."""

    def __init__(
        self, seeds: Sequence[int], limits: RestartLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = 0
        self._limits, self._clock = limits, clock
        self._recent = deque([clock()] * limits.inherited)
        """Moments of the restarts within the window."""
        self.seeds = list(seeds)
        self._used = set(seeds)
        self._barren = [0] * len(seeds)
        self.has_stepped = False
        """Some environment that crashed had completed a step before."""

    def record(self, crash: Crash, *, has_stepped: bool) -> int:
        """Count and log a restart, the first times with the traceback. Returns its seed. `has_stepped`: some
        environment that runs now has completed a step. Raises EnvCrashed for one restart too many, and EnvRaised where
        it raised and `limits.raises` is set.
        """
        row = crash.row
        self.has_stepped |= has_stepped or crash.steps > 0
        if self._limits.raises and crash.details:
            raise EnvRaised(crash.sentence(), row=row, details=crash.details) from crash.error
        self._barren[row] = 1 if crash.steps else self._barren[row] + 1
        if self._barren[row] > self._limits.barren:
            raise self._give_up(crash, f"it was restarted {self._limits.barren} times without completing a step")
        now = self._clock()
        while self._recent and now - self._recent[0] >= RESTART_WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._limits.total:
            many = f"{len(self._recent)} restarts within {RESTART_WINDOW_S / 60:.0f} minutes"
            raise self._give_up(crash, f"{many} are the limit")
        self._recent.append(now)
        seed = self.renew(row)
        log.warning(
            ENV_RESTARTED,
            env=row,
            reason=crash.what,
            steps=crash.steps,
            restarts=self.count,
            most_restarts=self._limits.total,
            **({"exception": crash.details} if crash.details and self.count <= _TOLD else {}),
        )
        return seed

    def renew(self, row: int) -> int:
        """Count a restart. Returns the seed for it: derived from the row's last one, never one used before."""
        self.count += 1
        for attempt in itertools.count(1):
            drawn = np.random.SeedSequence(self.seeds[row], spawn_key=(attempt,)).generate_state(1)[0]
            if (seed := int(drawn >> 1)) not in self._used:  # 31 bits
                break
        self._used.add(seed)
        self.seeds[row] = seed
        return seed

    def state(self) -> dict[str, object]:
        return {"count": self.count, "seeds": list(self.seeds), "used": sorted(self._used)}

    def restore(self, *, count: int, seeds: Sequence[int], used: Sequence[int]) -> None:
        self.count, self.seeds, self._used = count, list(seeds), set(used)
        self._barren = [0] * len(self.seeds)

    def _give_up(self, crash: Crash, reason: str) -> EnvCrashed:
        return EnvCrashed(
            f"{crash.sentence()}; {reason}: fix the environment",
            row=crash.row,
            has_stepped=self.has_stepped,
            details=crash.details,
        )
