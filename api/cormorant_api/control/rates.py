"""Frames per second of the fleet and of each worker over the last 10 s."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cormorant_worker.fleet.stats import FleetStats

_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    frames: int
    by_worker: dict[tuple[str, int], int] = field(default_factory=dict)


class RateWindow:
    """Samples of the fleet's counters. One thread adds, any thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[_Sample] = deque(maxlen=64)

    def sample(self, stats: FleetStats) -> None:
        """Add a sample. Call it about every second."""
        workers = {(worker.name, worker.attempt): worker.frames for worker in stats.workers}
        self._samples.append(_Sample(self._clock(), stats.stepped_frames, workers))

    def rate(self) -> float:
        """Frames stepped per second by the fleet."""
        first, last = self._window()
        return 0.0 if first is None or last is None else max(0.0, (last.frames - first.frames) / (last.at - first.at))

    def rate_of(self, worker: str, attempt: int) -> float:
        """Frames stepped per second by one worker."""
        first, last = self._window()
        if first is None or last is None:
            return 0.0
        key = (worker, attempt)
        return max(0.0, (last.by_worker.get(key, 0) - first.by_worker.get(key, 0)) / (last.at - first.at))

    def _window(self) -> tuple[_Sample | None, _Sample | None]:
        samples = tuple(self._samples)
        if not samples:
            return None, None
        last = samples[-1]
        first = next(s for s in samples if s.at >= last.at - _WINDOW_S)
        return (first, last) if last.at > first.at else (None, None)
