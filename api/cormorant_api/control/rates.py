"""What the fleet, each worker and each group of inference servers did per second, over the last 10 s."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from cormorant_worker.fleet.stats import FleetStats

_WINDOW_S = 10.0


Key = TypeVar("Key")
Sample = tuple[float, Mapping[Key, float]]
"""A time, and what was done until then."""


class RateWindow:
    """Samples of the fleet's counters. One thread adds, any thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fleet: deque[Sample[None]] = deque(maxlen=64)
        self._workers: deque[Sample[tuple[str, int]]] = deque(maxlen=16)
        """By worker and attempt."""
        self._servers: deque[Sample[tuple[str, str]]] = deque(maxlen=64)
        """By group and field of the message `Served`."""

    def sample(self, stats: FleetStats) -> None:
        """Add a sample of the fleet, and of its workers where `stats` has them."""
        now = self._clock()
        self._fleet.append((now, {None: stats.stepped_frames}))
        if stats.inference:
            done = {(group, name): value for group, books in stats.inference.items() for name, value in books.items()}
            self._servers.append((now, done))
        if stats.workers:
            self._workers.append((now, {(worker.name, worker.attempt): worker.frames for worker in stats.workers}))

    def rate(self) -> float:
        """Frames stepped per second by the fleet."""
        return _rate(self._fleet, None)

    def rate_of(self, worker: str, attempt: int) -> float:
        """Frames stepped per second by one worker."""
        return _rate(self._workers, (worker, attempt))

    def rate_of_servers(self, group: str, name: str) -> float:
        """What a group's inference servers did per second, by field of the message `Served`."""
        return _rate(self._servers, (group, name))


def _rate(found: deque[Sample[Key]], key: Key) -> float:
    samples = tuple(found)
    if not samples:
        return 0.0
    until, last = samples[-1]
    since, first = next(sample for sample in samples if sample[0] >= until - _WINDOW_S)
    return max(0.0, (last.get(key, 0) - first.get(key, 0)) / (until - since)) if until > since else 0.0
