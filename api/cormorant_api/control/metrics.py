"""The head's metrics: the fleet's and its own, as served by `/metrics`; and rates over the last 10 s."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping

from cormorant_contract.job import CollectorJob
from cormorant_contract.metrics import head as declared
from cormorant_contract.metrics.labels import HEAD_STATES, UPDATE_RESULTS, UPDATE_STAGES
from cormorant_contract.rest.status import Status
from cormorant_contract.rest.updates import Update
from cormorant_worker.fleet.stats import FleetStats
from cormorant_worker.metrics.exposition import Exposition
from cormorant_worker.metrics.fleet import FleetMetrics

_RECENT_S = 60.0
_EXITS = ("http", "memory")


class HeadMetrics:
    """Metrics of one head. Thread-safe."""

    def __init__(self, job: CollectorJob, *, floor_frames: int) -> None:
        """`floor_frames`: value of `frames_total` that earlier heads exported."""
        self.exposition = exposition = Exposition(declared.HEAD_METRICS, collectorjob=job.metadata.name)
        self.fleet = FleetMetrics(job, exposition, floor_frames=floor_frames)
        self.batches = {path: exposition.series(declared.BATCHES, path=path) for path in ("queue", *_EXITS)}
        self.batch_bytes = {path: exposition.series(declared.BATCH_BYTES, path=path) for path in _EXITS}
        self.results = {result: exposition.series(declared.UPDATES, result=result) for result in UPDATE_RESULTS}
        self._stages = {stage: exposition.series(declared.UPDATE_DURATION, stage=stage) for stage in UPDATE_STAGES}
        self.update_bytes = exposition.series(declared.UPDATE_BYTES)
        for state in HEAD_STATES:
            exposition.show(declared.HEAD_STATE_METRIC, 0, state=state)
        exposition.show(declared.HEAD_STARTED, time.time())

    def handed_over(self, path: str, size_bytes: int) -> None:
        self.batches[path].inc()
        self.batch_bytes[path].inc(size_bytes)

    def update_ended(self, update: Update) -> None:
        self.results[update.state].inc()
        if update.state != "applied":
            return
        self.exposition.show(declared.LAST_APPLIED, time.time())
        seconds = {name.removesuffix("_ms"): (ms or 0.0) / 1000 for name, ms in update.timings}
        for stage, duration_s in {**seconds, "total": sum(seconds.values())}.items():
            self._stages[stage].observe(duration_s)

    def show_state(self, state: str) -> None:
        for name in HEAD_STATES:
            self.exposition.show(declared.HEAD_STATE_METRIC, name == state, state=name)

    def show(self, status: Status) -> None:
        show, queue = self.exposition.show, status.queue
        self.show_state(status.phase.lower())
        show(declared.FRAMES_PER_SECOND, status.frames.per_second)
        show(declared.LENT_BATCHES, queue.lent)
        show(declared.REDELIVERED, queue.redelivered)
        stale = status.frames.dropped.get("stale_for_consumer", 0)
        show(declared.FRAMES_DROPPED, stale, reason="stale_for_consumer")
        now = time.time()
        show(declared.CONSUMERS, sum(now - c.last_seen_at.timestamp() < _RECENT_S for c in status.consumers))
        show(declared.UPDATE_IN_PROGRESS, status.weights.update_state in ("staged", "applying", "partially_applied"))


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

    def rate(self, key: Hashable = _FLEET) -> float:
        """Frames stepped per second by the fleet. Of a group's inference servers: `key` is the group and a field of the
        message `Served`.
        """
        return _rate(self._fleet, key)

    def rate_of(self, worker: str, attempt: int) -> float:
        """Frames stepped per second by one worker."""
        return _rate(self._workers, (worker, attempt))


def _rate(found: deque[tuple[float, Mapping[Hashable, float]]], key: Hashable) -> float:
    samples = tuple(found)
    if not samples:
        return 0.0
    until, last = samples[-1]
    since, first = next(sample for sample in samples if sample[0] >= until - _WINDOW_S)
    return max(0.0, (last.get(key, 0) - first.get(key, 0)) / (until - since)) if until > since else 0.0
