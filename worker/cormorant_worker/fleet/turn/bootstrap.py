"""What the first worker tells decides how memory and dataset are laid out; all others must agree."""

import time

import structlog

from cormorant_worker.errors import WorkerFailed
from cormorant_worker.fleet.bookkeeping.core import FleetCore
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.fleet.transport import BlockPool
from cormorant_worker.worker.messages import Begin, BuildPolicy, Ready, ServerReady

log = structlog.get_logger()


class Bootstrap:
    """Guarded by the fleet's condition."""

    def __init__(self, core: FleetCore) -> None:
        self.ready: Ready | None = None
        """What the first worker told, once memory and dataset are laid out."""
        self._core = core
        self._unmet: list[tuple[WorkerHandle, Ready]] = []
        """Workers that are ready before that."""
        self._is_under_way = False

    def tell_spaces(self, handle: WorkerHandle) -> None:
        """An inference server need not wait for a worker, once one has told what its environments are."""
        if self.ready is not None:
            handle.send(
                BuildPolicy(observation_space=self.ready.observation_space, action_space=self.ready.action_space)
            )

    @property
    def num_threads(self) -> int:
        """Threads of each worker's environments, as the first one found best; 0: not known."""
        return self.ready.num_threads if self.ready is not None else 0

    @property
    def batch_ids(self) -> int:
        """Trajectory ids that one batch can use: one a frame, and new ones for all environments twice."""
        num_envs = self.ready.layout.num_envs if self.ready is not None else 0
        return self._core.scheduler.frames_per_batch + 2 * num_envs

    def meet_server(self, handle: WorkerHandle, ready: ServerReady) -> None:
        """An inference server can be offered weights."""
        handle.ready(ready, now=self._core.hang_detector.lived_s)
        self._sync(handle)
        log.info("inference_server_ready", worker=handle.name, seconds=round(time.monotonic() - handle.started, 2))

    def _sync(self, handle: WorkerHandle) -> None:
        """Have it take the weights. The reply comes when a worker has opened its dataset and has them."""
        core = self._core
        core.offers.joined(handle)
        if not core.offers.offer_next(handle):
            handle.sync_request = core.requests.ask(handle, "resume")

    def meet(self, handle: WorkerHandle, ready: Ready) -> None:
        """A worker stands at its first observation."""
        if self.ready is not None:
            self._welcome(handle, ready, self.ready)
            return
        self._unmet.append((handle, ready))
        if self._is_under_way:
            return
        self._is_under_way = True
        core = self._core
        if core.options.whole_rows:
            core.scheduler.round_up(ready.layout.num_envs, num_workers=core.num_slots)
        limit, fewest = self._blocks_needed()
        core.background.submit(lambda: self._lay_out(ready, limit, fewest), lambda found: self._laid_out(ready, found))

    def size_blocks(self) -> None:
        """The number of slots has changed."""
        if (blocks := self._core.queue.blocks) is not None:
            limit, fewest = self._blocks_needed()
            blocks.resize(limit, at_least=fewest)

    def _blocks_needed(self) -> tuple[int, int]:
        """Two a worker, and the queue; and with how many a round can begin at least."""
        core = self._core
        queue = core.job.spec.output.queue
        per_round = core.num_slots if core.scheduler.mode == "sync" else 1
        return 2 * core.num_slots + (queue.capacity_batches * per_round if queue else 0), per_round

    def _lay_out(self, ready: Ready, limit: int, fewest: int) -> BlockPool:
        """Without the condition: an object store is asked what it has, a dataset may be far away."""
        blocks = self._core.engine.make_blocks(ready.layout, limit)
        blocks.resize(limit, at_least=fewest)
        if self._core.dataset is not None:
            self._core.dataset.open(self._core.job, ready)
        return blocks

    def _laid_out(self, ready: Ready, blocks: BlockPool | Exception) -> None:
        core = self._core
        if isinstance(blocks, Exception):
            core.lifecycle.fail(blocks, what="lay out memory for batches")
            return
        self.ready = ready
        for server in core.pool.workers.values():
            if server.is_server:
                self.tell_spaces(server)
        if core.statistics is not None and ready.statistics is not None:
            core.statistics.begin(ready.statistics)
        core.queue.use(blocks)
        self.size_blocks()
        queue, scheduler = core.job.spec.output.queue, core.scheduler
        waits_for_learner = queue is not None and queue.on_full == "wait"
        if scheduler.mode == "sync" and scheduler.max_staleness is None and waits_for_learner and ready.specs:
            # A learner that takes a round, publishes, and takes the next one is on-policy.
            scheduler.max_staleness = 0
            core.queue.is_on_demand = True
        core.scheduler.count_from(core.found_frames)
        unmet, self._unmet = self._unmet, []
        for handle, theirs in unmet:
            if not handle.is_gone:
                self._welcome(handle, theirs, ready)

    def _welcome(self, handle: WorkerHandle, ready: Ready, first: Ready) -> None:
        core = self._core
        if ready.layout != first.layout:
            error = WorkerFailed(
                f"worker {handle.name} makes batches of another layout than the first one: {ready.layout} instead of "
                f"{first.layout}; environments and policies must not differ between workers"
            )
            core.lifecycle.fail(error)
            return
        handle.ready(ready, now=core.hang_detector.lived_s)
        if core.scheduler.is_done:
            return  # the dataset had all frames already: the reaper sends it home
        handle.send(Begin(dataset_uri=core.dataset_uri, seal_after_s=core.options.seal_after_s))
        self._sync(handle)
        if core.lifecycle.is_paused:
            core.requests.tell(handle, "pause")
        log.info("worker_ready", worker=handle.name, seconds=round(time.monotonic() - handle.started, 2))
