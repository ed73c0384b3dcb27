"""Rates of the fleet, each worker and each group of inference servers over the last 10 s."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping

from cormorant_worker.fleet.stats import FleetStats

_WINDOW_S = 10.0
_FLEET = "fleet"


class RateWindow:
    """Samples of the fleet's counters. One thread adds, any thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fleet: deque[tuple[float, Mapping[Hashable, float]]] = deque(maxlen=64)
        """Sample times with totals: the fleet's frames; inference servers' counters, by group and field of the message
        `Served`.
        """
        self._workers: deque[tuple[float, Mapping[Hashable, float]]] = deque(maxlen=16)
        """Frames by worker and attempt."""

    def sample(self, stats: FleetStats) -> None:
        """Add a sample of the fleet, and of its workers if `stats` contains them."""
        now = self._clock()
        done: dict[Hashable, float] = {
            (group, name): value for group, books in stats.inference.items() for name, value in books.items()
        }
        self._fleet.append((now, {_FLEET: stats.stepped_frames, **done}))
        if stats.workers:
            self._workers.append((now, {(worker.name, worker.attempt): worker.frames for worker in stats.workers}))

    def rate(self) -> float:
        """Frames stepped per second by the fleet."""
        return _rate(self._fleet, _FLEET)

    def rate_of(self, worker: str, attempt: int) -> float:
        """Frames stepped per second by one worker."""
        return _rate(self._workers, (worker, attempt))

    def rate_of_servers(self, group: str, name: str) -> float:
        """Rates of a group's inference servers per second, by field of the message `Served`."""
        return _rate(self._fleet, (group, name))


def _rate(found: deque[tuple[float, Mapping[Hashable, float]]], key: Hashable) -> float:
    samples = tuple(found)
    if not samples:
        return 0.0
    until, last = samples[-1]
    since, first = next(sample for sample in samples if sample[0] >= until - _WINDOW_S)
    return max(0.0, (last.get(key, 0) - first.get(key, 0)) / (until - since)) if until > since else 0.0
