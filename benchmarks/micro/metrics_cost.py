"""What the metrics cost: the same collector with and without them, batch by batch in turn.

With: where the time goes is measured, and each batch is told to the fleet's metrics, as the fleet's thread does; the
books are read twice a second, as the head does, and scraped every 15 s, which is charged to the batches by their time.
Without: none of it. The cheapest environments are the hardest case.
"""

import time
from collections.abc import Callable, Sequence

from benchmarks.micro import rows
from benchmarks.ours import make_job
from benchmarks.workloads import WORKLOADS
from cormorant_contract.metrics.head import HEAD_METRICS
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.build import build_collector
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.timing import BatchTiming, Laps, Timing
from cormorant_worker.fleet.events import FleetEvent
from cormorant_worker.metrics.exposition import Exposition
from cormorant_worker.metrics.fleet import FleetMetrics
from cormorant_worker.worker.messages import Sealed

SCRAPE_S = 15.0
BATCHES = 4
"""A round's."""


class NoTiming(Timing):
    """Measures nothing."""

    def rest(self, activity: int) -> None:
        return

    def begin(self) -> None:
        return

    def next_laps(self) -> Laps | None:
        return None


def measure(*, quick: bool) -> Sequence[dict]:
    return [row for name in ("random-cartpole-64", "cartpole-8") for row in _cost(name, rounds=10 if quick else 100)]


def _cost(name: str, *, rounds: int) -> list[dict]:
    workload = WORKLOADS[name]
    job = make_job(workload, workers=1)
    exposition = Exposition(HEAD_METRICS, collectorjob=job.metadata.name)
    metrics = FleetMetrics(job, exposition)
    collector = build_collector(job, WorkerPlace(seed=7))
    block = Block(collector.layout(workload.steps_per_batch))
    with collector:
        on, off = rows.interleaved(
            _collecting(collector, block, Timing(), metrics.on_fleet_event),
            _collecting(collector, block, NoTiming(), _ignore),
            rounds=rounds,
        )
    start = time.perf_counter()
    for _ in range(20):
        exposition.text()
    scrape_s = (time.perf_counter() - start) / 20
    return [
        rows.row(f"metrics on over off, {name}", rows.median_ratio(on, off) + scrape_s / SCRAPE_S, "x", bar="<= 1.01"),
        rows.row(f"one scrape of a head, {name}", 1e3 * scrape_s, "ms", bar="<= 50"),
    ]


def _collecting(
    collector: Collector, block: Block, timing: Timing, hear: Callable[[FleetEvent], None]
) -> Callable[[], None]:
    def collect() -> None:
        collector.timing = timing
        for _ in range(BATCHES):
            filled = collector.fill(block, block.layout.num_frames)
            sealed = Sealed(
                number=0, num_frames=filled.num_frames, num_rows=block.num_rows,
                min_version=0, max_version=0, episodes=filled.episodes, timing=_timing_of(timing),
            )  # fmt: skip
            hear(FleetEvent(kind="sealed", worker="cpu-0", frames=filled.num_frames, sealed=sealed))

    return collect


def _timing_of(timing: Timing) -> BatchTiming:
    if isinstance(timing, NoTiming):
        return BatchTiming(seconds=0.0, env_step_s=0.0, inference_s=0.0)
    return timing.take()


def _ignore(_: FleetEvent) -> None:
    return


if __name__ == "__main__":
    rows.main(measure)
