"""The head's metrics: the fleet's and its own, as served by `/metrics`."""

import time

from cormorant_contract.job import CollectorJob
from cormorant_contract.metrics import head as declared
from cormorant_contract.metrics.labels import HEAD_STATES, UPDATE_RESULTS, UPDATE_STAGES
from cormorant_contract.rest.status import Status
from cormorant_contract.rest.updates import Update
from cormorant_worker.metrics.exposition import Exposition
from cormorant_worker.metrics.fleet import FleetMetrics

_RECENT_S = 60.0
_EXITS = ("http", "memory")
_FROM_THE_STATUS = (
    declared.FRAMES_PER_SECOND,
    declared.LENT_BATCHES,
    declared.REDELIVERED,
    declared.CONSUMERS,
    declared.UPDATE_IN_PROGRESS,
)
"""Series that exist before there is a status."""


class HeadMetrics:
    """Metrics of one head. Thread-safe."""

    def __init__(self, job: CollectorJob, *, floor_frames: int) -> None:
        """`floor_frames`: value of `frames_total` that earlier heads exported."""
        self.exposition = exposition = Exposition(declared.HEAD_METRICS, collectorjob=job.metadata.name)
        self.fleet = FleetMetrics(job, exposition, floor_frames=floor_frames)
        self.batches = {path: exposition.counter(declared.BATCHES, path=path) for path in ("queue", *_EXITS)}
        self.batch_bytes = {path: exposition.counter(declared.BATCH_BYTES, path=path) for path in _EXITS}
        self._results = {result: exposition.counter(declared.UPDATES, result=result) for result in UPDATE_RESULTS}
        self._stages = {stage: exposition.histogram(declared.UPDATE_DURATION, stage=stage) for stage in UPDATE_STAGES}
        self.update_bytes = exposition.counter(declared.UPDATE_BYTES)
        for metric in _FROM_THE_STATUS:
            exposition.show(metric, 0)
        for state in HEAD_STATES:
            exposition.show(declared.HEAD_STATE_METRIC, 0, state=state)
        exposition.show(declared.HEAD_STARTED, time.time())

    # -- events ------------------------------------------------------------------------------------------------

    def handed_over(self, path: str, size_bytes: int) -> None:
        self.batches[path].inc()
        self.batch_bytes[path].inc(size_bytes)

    def update_ended(self, update: Update) -> None:
        self._results[update.state].inc()
        if update.state != "applied":
            return
        self.exposition.show(declared.LAST_APPLIED, time.time())
        timings = update.timings
        stages = {
            "receive": timings.receive_ms,
            "verify": timings.verify_ms,
            "distribute": timings.distribute_ms,
            "apply": timings.apply_ms or 0.0,
        }
        for stage, milliseconds in stages.items():
            self._stages[stage].observe(milliseconds / 1000)
        self._stages["total"].observe(sum(stages.values()) / 1000)

    def publish_refused(self) -> None:
        """A publish was refused before any worker received it."""
        self._results["rejected"].inc()

    # -- gauges ------------------------------------------------------------------------------------------------

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
