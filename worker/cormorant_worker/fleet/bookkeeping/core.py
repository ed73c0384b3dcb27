"""What a fleet knows, put together. Each field's class alone writes its own state; the fleet's condition guards it.

What acts on it is in `fleet/turn/`:

Bootstrap        what the first worker tells, and what is laid out for it
Spawner, Reaper  fill slots, and empty them
Tickets          who collects what next
Inbox            what workers say
Quiesce          callers that wait for workers; a fleet between two batches
"""

from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import StateError, WeightsError
from cormorant_worker.fleet.background import BackgroundTasks
from cormorant_worker.fleet.bookkeeping.batch_queue import BatchQueue
from cormorant_worker.fleet.bookkeeping.counters import FleetCounters
from cormorant_worker.fleet.bookkeeping.desired_slots import DesiredSlots
from cormorant_worker.fleet.bookkeeping.env_failures import EnvFailures
from cormorant_worker.fleet.bookkeeping.hang_detector import HangDetector
from cormorant_worker.fleet.bookkeeping.inference_servers import InferenceServers
from cormorant_worker.fleet.bookkeeping.job_facts import dataset_of, episodes_of
from cormorant_worker.fleet.bookkeeping.lifecycle import Lifecycle
from cormorant_worker.fleet.bookkeeping.lineage import Lineage
from cormorant_worker.fleet.bookkeeping.offers import Offers
from cormorant_worker.fleet.bookkeeping.replacements import Replacements
from cormorant_worker.fleet.bookkeeping.requests import Requests
from cormorant_worker.fleet.bookkeeping.scheduler import Scheduler
from cormorant_worker.fleet.bookkeeping.worker_pool import WorkerPool
from cormorant_worker.fleet.events import Events
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.stats import FleetStats
from cormorant_worker.fleet.transport import Engine
from cormorant_worker.fleet.waker import Waker
from cormorant_worker.normalize.book import StatisticsBook

_NEVER_STALE = 1 << 60
_SWEPT = 256
"""Workers whose heartbeats are read for an answer: of a larger fleet, the others' were within the last second."""


class FleetCore:
    def __init__(self, job: CollectorJob, options: FleetOptions, engine: Engine) -> None:
        """An empty fleet. The engine stays the caller's to close."""
        self.job, self.options, self.engine = job, options, engine
        collection, queue = job.spec.collection, job.spec.output.queue
        self.waker, self.events = Waker(), Events()
        self.background = BackgroundTasks(self.waker.wake)
        self.lifecycle = Lifecycle(self.events, is_paused=options.starts_paused)
        self.episodes = episodes = episodes_of(job)
        """Set for an evaluation, whose frames are episodes."""
        self.scheduler = Scheduler(
            mode=collection.mode,
            frames_per_batch=collection.frames_per_batch,
            total_frames=collection.total_frames,
            max_staleness=collection.weights.max_staleness,
            preemptive_threshold=collection.preemptive_threshold,
        )
        if episodes is not None:
            # No worker holds a second ticket: what it had to play later, others could play now.
            self.scheduler = Scheduler(
                mode="async",
                frames_per_batch=episodes.chunk_size(num_envs=job.spec.env.num_envs, num_workers=options.workers),
                total_frames=len(episodes.planned),
                max_staleness=_NEVER_STALE,
            )
        self.dataset = dataset = dataset_of(job, epoch=options.epoch)
        self.found_frames = options.floor_frames if dataset is None else dataset.frames
        """Frames that counted before this fleet collected any: those of the dataset, or the options' floor."""
        if episodes is not None:
            self.found_frames = episodes.found
        earlier = options.statistics if dataset is None or not dataset.frames else dataset.statistics
        self.statistics = None if collection.normalize is None else StatisticsBook(earlier)
        """None where the manifest normalises nothing."""
        self.queue = BatchQueue(
            self.scheduler,
            capacity=queue.capacity_batches if queue else 0,
            drops_oldest=queue is not None and queue.on_full == "drop_oldest",
            has_dataset=dataset is not None,
            events=self.events,
            statistics=self.statistics,
        )
        self.pool, self.counters = WorkerPool(DesiredSlots(job)), FleetCounters()
        self.requests = Requests(self.pool.workers)
        self.servers = InferenceServers(self.pool.slots, self.pool.workers, self.requests, engine.listen)
        self.offers = Offers(
            self.pool.workers, self.events, next_number=self.requests.next_number, statistics=self.statistics
        )
        self.hang_detector = HangDetector(job, options, self.pool.workers, self.counters)
        self.replacements, self.env_failures = Replacements(job, options), EnvFailures(job)
        self.lineage = Lineage(
            epoch=options.epoch if dataset is None else dataset.epoch,
            written={} if dataset is None else dataset.written,
            warmup_frames=max(0, collection.init_random_frames - self.found_frames),
        )

    @property
    def dataset_uri(self) -> str:
        """Empty: none."""
        return self.dataset.uri if self.dataset is not None else ""

    @property
    def num_slots(self) -> int:
        """Number of slots of workers that collect."""
        return len(self.pool.slots.collecting)

    def refuse_weights_of_evaluation(self) -> None:
        if self.episodes is not None:
            raise WeightsError(
                "an evaluation plays the weights that it began with; start another one with these as initialWeights"
            )

    def refuse_states_of_evaluation(self) -> None:
        if self.episodes is not None:
            raise StateError(
                "an evaluation has no state, and each of its episodes a seed of its own: it goes on from its results "
                "folder; start another one with other seeds in collection.episodes"
            )

    def stats(self) -> FleetStats:
        """The whole fleet at this moment, without `workers`."""
        self.hang_detector.sweep(_SWEPT)
        counters, pool = self.counters, self.pool
        accepted = self.scheduler.accepted_frames
        return FleetStats(
            frames=accepted,
            settled_frames=max(0, accepted - self.queue.unsettled_frames),
            stepped_frames=counters.stepped_frames,
            total_frames=self.scheduler.total_frames,
            episodes=counters.episodes,
            recent_returns=tuple(counters.returns),
            recent_task_metrics={key: tuple(values) for key, values in counters.task_metrics.items()},
            recent_metrics={name: tuple(values) for name, values in counters.metrics.items()},
            recent_lengths=tuple(counters.lengths),
            task_episodes=dict(counters.task_episodes),
            version=self.offers.published.version,
            dropped=dict(self.queue.dropped),
            restarts=self.replacements.count,
            env_failures=self.env_failures.sentence,
            queued_batches=self.queue.num_waiting,
            paused=self.lifecycle.is_paused,
            workers=(),
            groups={
                group.name: counters.group(group.name, desired=pool.slots.sizes.get(group.name, 0))
                for group in self.job.spec.worker_groups
            },
            queue_waits_s=counters.waits_s,
            undurable_frames=counters.undurable_frames if self.dataset else 0,
            statistics={} if self.statistics is None else self.statistics.glance(),
            inference={group: dict(books) for group, books in self.servers.served.items()},
        )
