"""State of a fleet. Each class writes only its own part; the fleet's condition guards all of it.

The code that acts on it is in `fleet/turn/`: the fleet's thread and workers' messages (`loop.py`), the life of slots
(`life.py`), and operations between two batches (`quiesce.py`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import CormorantError, DatasetError, WorkerFailed
from cormorant_worker.fleet.batch_queue import BatchQueue
from cormorant_worker.fleet.connections import BackgroundTasks, Connections, Waker
from cormorant_worker.fleet.events import Events
from cormorant_worker.fleet.hang_detector import HangDetector
from cormorant_worker.fleet.offers import Offers
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.scheduler import Scheduler
from cormorant_worker.fleet.slot import SlotState
from cormorant_worker.fleet.slots import Lineage, Slots
from cormorant_worker.fleet.stats import EnvFailures, FleetCounters, FleetStats
from cormorant_worker.fleet.transport import Engine
from cormorant_worker.normalize import StatisticsBook
from cormorant_worker.weights.cached import Settled
from cormorant_worker.worker.messages import Ready

if TYPE_CHECKING:
    from cormorant_worker.evaluation.results import EpisodeBook
    from cormorant_worker.fleet.dataset_root import DatasetRoot

log = structlog.get_logger()

_NEVER_STALE = 1 << 60
_SWEPT = 256
"""Workers whose heartbeats are read for an answer: of a larger fleet, the others' were within the last second."""


class FleetCore:
    def __init__(self, job: CollectorJob, options: FleetOptions, engine: Engine) -> None:
        """An empty fleet. The engine stays the caller's to close."""
        self.job, self.options, self.engine = job, options, engine
        self.changed = threading.Condition()
        """Guards all parts of the fleet; notified at every turn of its thread."""
        self.ready: Ready | None = None
        """The first worker's report, once memory and dataset are laid out."""
        collection, queue = job.spec.collection, job.spec.output.queue
        self.waker, self.events = Waker(), Events()
        self.background, self.connections = BackgroundTasks(self.waker.wake), Connections(self.waker)
        self.is_paused, self.is_closing = options.starts_paused, False
        output = job.spec.output.dataset
        if output is not None and output.uri.startswith("memory:"):
            raise DatasetError(
                f"{output.uri}: each process has a memory of its own, so nobody could read what workers write; name a "
                "folder or an object store, such as s3://"
            )
        self.error: CormorantError | None = None
        """Why the fleet cannot go on: the first cause."""
        self.episodes: EpisodeBook | None = None
        """Set for an evaluation, whose frames are episodes."""
        self.dataset: DatasetRoot | None = None
        self.found_frames = options.floor_frames
        """Frames that counted before this fleet collected any: those of the dataset, or the options' floor."""
        self.inherited_frames = 0
        """The part of them that workers' pods or consumers reported; see `inherit`."""
        # What only some fleets have is imported by these alone: pyarrow takes a while to load.
        if collection.episodes is not None:
            from cormorant_worker.evaluation import results

            self.episodes = episodes = results.EpisodeBook(job)
            self.found_frames = episodes.found
            assert options.workers is not None  # the engine completed them
            # No worker holds a second ticket: what it had to play later, others could play now.
            self.scheduler = Scheduler(
                mode="async",
                frames_per_batch=episodes.chunk_size(num_envs=job.spec.env.num_envs, num_workers=options.workers),
                total_frames=len(episodes.planned),
                max_staleness=_NEVER_STALE,
            )
        else:
            self.scheduler = Scheduler(
                mode=collection.mode,
                frames_per_batch=collection.frames_per_batch,
                total_frames=collection.total_frames,
                max_staleness=collection.weights.max_staleness,
                preemptive_threshold=collection.preemptive_threshold,
            )
            if output is not None:
                from cormorant_worker.fleet import dataset_root

                self.dataset = dataset_root.DatasetRoot(output.uri, job=job.metadata.name, epoch=options.epoch)
                self.found_frames = self.dataset.frames
        dataset = self.dataset
        earlier = options.statistics if dataset is None or not dataset.frames else dataset.statistics
        self.statistics = None if collection.normalize is None else StatisticsBook(earlier)
        """None where the manifest normalizes nothing."""
        self.queue = BatchQueue(
            self.scheduler,
            capacity=queue.capacity_batches if queue else 0,
            drops_oldest=queue is not None and queue.on_full == "drop_oldest",
            has_dataset=dataset is not None,
            events=self.events,
            statistics=self.statistics,
            storing_device=options.storing_device,
            post_processing=collection.post_processing,
            changed=self.changed,
            wake=self.waker.wake,
        )
        self.slots = Slots(job, {} if dataset is None else dataset.written)
        self.counters, self.env_failures = FleetCounters(), EnvFailures()
        self.misplaced = ""
        """Why the last worker whose pod cannot run one could not; empty: there was none."""
        self.offers = Offers(self.slots, self.events, policy=job.spec.policy, statistics=self.statistics)
        self.hang_detector = HangDetector(job, options, self.counters)
        self.lineage = Lineage(
            epoch=options.epoch if dataset is None else dataset.epoch,
            warmup_frames=max(0, collection.init_random_frames - self.found_frames),
        )

    def inherit(self, settled: Settled) -> None:
        """Count what an earlier head settled beyond this fleet's count: only workers' pods may have it."""
        if settled.epoch >= self.options.epoch or self.dataset is not None or self.episodes is not None:
            return
        remaining = self.scheduler.remaining_frames
        new = settled.frames - self.found_frames
        new = new if remaining is None else min(new, remaining)  # what is being collected already is not taken back
        if new > 0:
            self.found_frames += new
            self.inherited_frames += new
            self.scheduler.accepted_frames += new
            log.info("frames_inherited", frames=new, epoch=settled.epoch)

    def tick(self) -> None:
        """Add the time that workers and consumers have waited since the last call."""
        self.counters.tick(is_full=self.queue.is_full, is_asked=self.queue.num_asking > 0)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A consumer waits for a round."""
        self.queue.num_asking += 1
        self.tick()
        if self.queue.is_on_demand:
            self.waker.wake()
        try:
            yield
        finally:
            self.queue.num_asking -= 1
            self.tick()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is true. Returns False after `timeout_s`. The condition is released meanwhile."""
        return self.changed.wait_for(predicate, min(timeout_s, threading.TIMEOUT_MAX))

    # -- paused, closing, failed -------------------------------------------------------------------------------

    def set_paused(self, *, is_paused: bool) -> None:
        if is_paused is not self.is_paused:
            self.events.note("paused" if is_paused else "resumed")
        self.is_paused = is_paused

    def fail(self, error: Exception, *, what: str = "") -> None:
        """End the fleet with an error. `what`: the failed action, for errors that are not ours: "start a worker"."""
        if self.error is None:
            known = isinstance(error, CormorantError)
            self.error = error if known else WorkerFailed(f"cannot {what}: {type(error).__name__}: {error}")  # type: ignore[assignment]  # checked
            self.events.note("failed", reason=str(self.error))

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    # -- what follows from the rest ----------------------------------------------------------------------------

    @property
    def dataset_uri(self) -> str:
        """Empty: none."""
        return self.dataset.uri if self.dataset is not None else ""

    @property
    def num_slots(self) -> int:
        return len(self.slots.collecting)

    @property
    def blocks_needed(self) -> tuple[int, int]:
        """Blocks wanted (two per worker plus the queue), and the minimum to start a round."""
        queue = self.job.spec.output.queue
        per_round = self.num_slots if self.scheduler.mode == "sync" else 1
        return 2 * self.num_slots + (queue.capacity_batches * per_round if queue else 0), per_round

    def size_blocks(self) -> None:
        """Adapt the block pool to a changed number of slots."""
        if self.queue.blocks is not None:
            limit, fewest = self.blocks_needed
            self.queue.blocks.resize(limit, at_least=fewest)

    def stats(self) -> FleetStats:
        """Current statistics of the whole fleet, without `workers`."""
        self.hang_detector.sweep(_SWEPT)
        counters = self.counters
        accepted = self.scheduler.accepted_frames
        return FleetStats(
            frames=accepted,
            settled_frames=max(0, accepted - self.queue.unsettled_frames),
            stepped_frames=sum(books.stepped_frames for books in counters.groups.values()),
            total_frames=self.scheduler.total_frames,
            episodes=counters.episodes,
            recent={key: tuple(values) for key, values in counters.recent.items()},
            task_episodes=dict(counters.task_episodes),
            version=self.offers.version,
            dropped=dict(self.queue.dropped),
            restarts=sum(books.restarts.total() for books in counters.groups.values()),
            env_failures=self.env_failures.sentence(dropped=sum(self.queue.dropped.values())),
            queued_batches=self.queue.num_waiting,
            paused=self.is_paused,
            workers=(),
            groups={
                group.name: counters.group(group.name, desired=self.slots.sizes.get(group.name, 0))
                for group in self.job.spec.worker_groups
            },
            retiring=self.slots.count(SlotState.LEAVING, SlotState.FINISHING),
            queue_waits_s=dict(counters.waits_s),
            undurable_frames=counters.undurable_frames if self.dataset else 0,
            statistics={} if self.statistics is None else self.statistics.glance(),
            inference={group: dict(books) for group, books in counters.served.items()},
        )
