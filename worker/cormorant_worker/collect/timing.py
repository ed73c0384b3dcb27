"""Where a worker's time goes, at almost no cost: one vector step in 16 is measured and represents the other 15.

    rest(IDLE) .. rest(WEIGHTS) .. begin .. vector steps .. [rest(PAUSED) .. begin ..] .. rest(STORE) .. rest(IDLE)

Everything between two calls belongs to one activity. Stepping time is divided among environments, the policy, and the
rest, in the proportions of the last measured steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns

import numpy as np

from cormorant_worker.spaces import Array

ENV, INFERENCE, TRANSFER, WEIGHTS, STORE, IDLE, PAUSED, BUILD = range(NUM_ACTIVITIES := 8)
"""In the order of `cormorant_contract.metrics.labels.ACTIVITIES`."""
ACTIVITY, SINCE = NUM_ACTIVITIES, NUM_ACTIVITIES + 1
"""Positions of the current activity, and of its begin, after the nanoseconds by activity; 0: nothing has begun."""
NUM_TIMING = NUM_ACTIVITIES + 2
STEPPING = -1
"""Value of ACTIVITY while stepping: this time is divided among several activities when the next vector step is
measured."""
_EVERY = 16
"""Vector steps for each one that is measured."""
_WEIGHT = 0.2
"""Weight of the newest measurement in the shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTiming:
    seconds: float
    """Stepping time, without pauses."""
    env_step_s: float
    """Waiting for a vector step of the environments, on average over those that were measured; 0: none was."""
    inference_s: float
    """One policy call, averaged in the same way."""


@dataclass(slots=True)
class Laps:
    """Times that EnvGroups add up during a measured vector step."""

    env_ns: int = 0
    """In `recv`."""
    inference_ns: int = 0
    """In `act` of the actor."""


def spent_ns(timing: Sequence[int], *, until_ns: int) -> tuple[int, ...]:
    """Nanoseconds by activity, from the [NUM_TIMING] numbers: of vector steps, up to the last measured one; of another
    current activity, which is written only when it ends, up to `until_ns` by this machine's `time.monotonic_ns`.
    """
    activity, since = timing[ACTIVITY], timing[SINCE]
    spent = list(timing[:NUM_ACTIVITIES])
    if activity != STEPPING and since:
        spent[activity] += max(0, until_ns - since)
    return tuple(spent)


class Timing:
    """One worker's time. Owned by the thread that steps; others, in any process of this
    machine, whose clock is the same, read its numbers: `spent_ns`.
    """

    def __init__(self, numbers: Array | None = None) -> None:
        """Begin, with building. `numbers`: [NUM_TIMING] int64, zeroed memory to keep the times in."""
        self._numbers = np.zeros(NUM_TIMING, dtype=np.int64) if numbers is None else numbers
        self._left = 1
        self._env_share = self._inference_share = 0.0
        self._env_ns = self._inference_ns = self._measured = self._stepped_ns = 0
        """Since the last `take`."""
        self._activity = BUILD
        self._since = monotonic_ns()
        self.rest(BUILD)

    def rest(self, activity: int) -> None:
        """Begin an activity other than stepping."""
        now = monotonic_ns()
        elapsed, self._since = now - self._since, now
        if self._activity == STEPPING:
            env, inference = int(elapsed * self._env_share), int(elapsed * self._inference_share)
            self._numbers[ENV] += env
            self._numbers[INFERENCE] += inference
            self._numbers[TRANSFER] += elapsed - env - inference
            self._stepped_ns += elapsed
        else:
            self._numbers[self._activity] += elapsed
        self._activity = activity
        self._numbers[ACTIVITY], self._numbers[SINCE] = activity, now

    @property
    def now_s(self) -> float:
        """Start of the current activity, by `time.monotonic`."""
        return self._since / 1e9

    def begin(self) -> None:
        self.rest(STEPPING)

    def next_laps(self) -> Laps | None:
        """`Laps` for the next vector step if it is measured, which is one in 16; else None."""
        self._left -= 1
        if self._left:
            return None
        self._left = _EVERY
        self.begin()
        return Laps()

    def measured(self, laps: Laps, *, steps: int = 1) -> None:
        """Record a measured vector step, or several at once."""
        total_ns = max(1, monotonic_ns() - self._since)
        weight = _WEIGHT if self._env_share or self._inference_share else 1.0
        self._env_share += weight * (laps.env_ns / total_ns - self._env_share)
        self._inference_share += weight * (laps.inference_ns / total_ns - self._inference_share)
        self._env_ns += laps.env_ns
        self._inference_ns += laps.inference_ns
        self._measured += steps

    def take(self) -> BatchTiming:
        """Timings since the last call, between two batches."""
        steps = self._measured or 1
        taken = BatchTiming(
            seconds=self._stepped_ns / 1e9,
            env_step_s=self._env_ns / steps / 1e9,
            inference_s=self._inference_ns / steps / 1e9,
        )
        self._env_ns = self._inference_ns = self._measured = self._stepped_ns = 0
        return taken
