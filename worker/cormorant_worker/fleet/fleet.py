"""A fleet: the collectors of one job, on any engine.

One thread owns the workers (`loop.py`): it reads their messages, hands out tickets, replaces the dead. Everything it
knows is guarded by one condition, on which callers (the consumer of batches, control calls) wait with a limit.

    consumers -- borrow ---> queue <--- accept --- rounds <--- Sealed --- workers
                               |                                             ^
                               +--- blocks given back ---> tickets ----------+
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import cloudpickle
import numpy as np
import structlog

from cormorant_contract.job import CollectorJob
from cormorant_contract.weights import Publishable, file_of
from cormorant_worker.collect.block import Layout
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import ControlTimeout, FleetClosed, FleetError, NoSuchWorker, WeightsError
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.fleet.core import FleetCore
from cormorant_worker.fleet.events import Listener
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.local.engine import LocalEngine
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.slot import SlotState, WorkerHandle
from cormorant_worker.fleet.stats import FleetStats, WorkerReceipts
from cormorant_worker.fleet.transport import Engine
from cormorant_worker.fleet.turn.life import SlotLife
from cormorant_worker.fleet.turn.loop import FleetLoop
from cormorant_worker.fleet.turn.quiesce import Quiesce
from cormorant_worker.logs import quiet_by_default
from cormorant_worker.normalize import StatisticsBook
from cormorant_worker.spaces import Array, Space
from cormorant_worker.weights.blob import WeightsBlob, in_models, to_bytes
from cormorant_worker.weights.cached import Settled
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion, WeightSpecs, verify
from cormorant_worker.worker import messages

log = structlog.get_logger()

_HIGHEST_CHOSEN = 2**62
"""The versions after it are left for publishes without a number of their own: frames are stamped with 64 bits."""
_CLOSE_S = 20.0
"""For workers that are being killed, the last thing a fleet waits for."""
_PEEK_S = 2.0
"""A person watches: the next peek comes soon."""
_FETCH_S = 60.0
"""For the bytes of a policy from another node."""


class WorkerFleet:
    """The workers of one job, for the head and `local_fleet.py`. Methods may be called from any thread."""

    def __init__(self, job: CollectorJob, options: FleetOptions | None = None, *, engine: Engine | None = None) -> None:
        """Start the workers and wait until all of them stand at their first observation; where slots come from
        elsewhere (pods in a cluster), until one does. The fleet closes the engine (this machine by default), also when
        it cannot start. Raises WorkerFailed with the message of the environment, the policy or the weights;
        ControlTimeout where workers were not placed or started in time; and the errors of the dataset, the device and
        the engine's memory.
        """
        quiet_by_default()
        self.job = job
        self._engine = engine or LocalEngine()
        self._warns_of_staleness = (
            job.spec.collection.weights.max_staleness is None and job.spec.policy.exploration_type == "random"
        )
        self._is_closed = False
        try:
            self.options = self._engine.complete(job, options or FleetOptions())
            self._core = core = FleetCore(job, self.options, self._engine)
        except BaseException:
            self._engine.close()
            raise
        self.episodes, self._changed = core.episodes, core.changed
        self._life = SlotLife(core)
        self._quiesce = Quiesce(core, self._life)
        self._loop = FleetLoop(core, self._life, self._quiesce)
        try:
            assert self.options.workers is not None  # the engine completed them
            self._life.resize(self.options.workers)
            self._loop.start()
            with self._changed:
                self._quiesce.await_workers("to start")
        except BaseException:
            self.close()
            raise

    # -- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish current batches, drop the queue, close datasets: at most `drain_timeout_s`. May be called twice."""
        core = self._core
        with self._changed:
            if self._is_closed:
                return
            core.is_closing = True
            began = time.monotonic()
            core.slots.tell_all(messages.PlainCommand.RESUME)
            for handle in tuple(core.slots.workers):
                if not handle.is_ready:  # it has nothing to lose yet
                    self._life.lose(handle, is_killed=True)
            core.waker.wake()
            drain_s = self.options.drain_timeout_s
            if not core.wait_for(lambda: self._life.is_idle, drain_s * 0.5):
                core.slots.tell_all(messages.PlainCommand.STOP, only_ready=False)
            core.wait_for(lambda: core.slots.is_empty, began + drain_s * 0.9 - time.monotonic())
            self._is_closed = True
            self._loop.stop()
            self._changed.notify_all()
        self._loop.join()
        for handle in tuple(core.slots.workers):
            log.warning("worker_killed", worker=handle.name, reason="it did not end in time")
            handle.connection.close()
        core.background.finish(self._changed, timeout_s=_CLOSE_S)  # workers that were being started or seen off
        core.waker.close()
        core.connections.close()
        core.slots.clear()
        core.offers.clear()
        if core.dataset is not None:
            core.dataset.close()
        if core.queue.blocks is not None:
            core.queue.blocks.close()  # views stay valid
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- batches -----------------------------------------------------------------------------------------------

    def skip(self, *, timeout_s: float | None = None) -> int:
        """Count the next round without reading it. Returns its frames; 0: all are delivered. Raises the errors of
        `borrow`.
        """
        if (loan := self.borrow(timeout_s=timeout_s)) is None:
            return 0
        with loan:
            loan.acknowledge()
            return loan.num_frames

    def borrow(self, *, timeout_s: float | None = None) -> Loan | None:
        """Borrow the next round; None once `totalFrames`, or all frames of a drained fleet, are delivered. Loans that
        are not returned block the workers, because each counts against `output.queue.capacityBatches` (with `onFull:
        drop_oldest`: only once they use all memory). A loan is never dropped. With `maxStaleness: 0` the next round
        begins only once all loans are returned. Without `timeout_s` it waits as long as workers make progress. Raises
        ControlTimeout, WorkerFailed, FleetClosed, and FleetError without output.queue.
        """
        if self.job.spec.output.queue is None:
            raise FleetError("the manifest has no output.queue: its frames go to the dataset alone; add queue: {}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        core = self._core
        with self._changed, core.asking():
            while True:
                core.raise_error()
                loan, waiting = None, core.queue.num_waiting
                if not self._is_closed:
                    loan = core.queue.take(min_version=self.oldest_version)
                # Only for news: the fleet's thread notifies callers that wait at every turn.
                if core.queue.num_waiting != waiting:
                    core.waker.wake()
                if loan is not None:
                    break
                if self._loop.is_done and core.scheduler.is_done:
                    return None
                if core.is_closing:
                    raise FleetClosed("the fleet was closed")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise ControlTimeout(f"no batch came within {timeout_s} s; {core.slots.describe()}")
                self._changed.wait(left)
            acted = loan.min_version
            behind = max(0, core.offers.common_version - acted) if acted >= 0 else 0
            core.events.note("lent", frames=loan.num_frames, version=acted, staleness=behind)
        if self._warns_of_staleness and behind > 1:
            # Once, for learners that get older policies' frames and never said that they can use them.
            self._warns_of_staleness = False
            log.warning(
                "batch_is_stale",
                versions=behind,
                reason="workers collect while the learner learns",
                remedy="for PPO and other on-policy algorithms pass on_policy=True, or set spec.collection.weights."
                "maxStaleness: 0 in the manifest; for off-policy ones set it to as many versions as they accept",
            )
        return loan

    # -- control -----------------------------------------------------------------------------------------------

    def publish(
        self,
        weights: Publishable | WeightsBlob,
        *,
        version: int | None = None,
        wait_s: float = 0.0,
        workers: Sequence[str] = (),
        allow_nonfinite: bool = False,
    ) -> WorkerReceipts:
        """Hand new weights to every worker; each applies them at its next batch boundary, all of them or none. A
        checked blob must not change any more. `workers`: the only ones that get them, as do their replacements;
        `state()` and staleness consider only weights for all. `wait_s`: seconds to wait for every worker to use them.
        Raises WeightsMismatch, NonfiniteWeights, StaleWeights, WeightsError, and FleetError where there is no such
        worker; then nothing was published.
        """
        if self.episodes is not None:
            raise WeightsError(
                "an evaluation plays the weights that it began with; start another one with these as initialWeights"
            )
        if version is not None and version > _HIGHEST_CHOSEN:
            raise WeightsError(f"version {version} is past {_HIGHEST_CHOSEN}, the highest allowed; choose a lower one")
        if not isinstance(weights, WeightsBlob):
            if (data := file_of(weights)) is not None:
                weights = WeightsBlob.from_bytes(data)
            else:
                weights = WeightsBlob.of(in_models(weights))
        verify(weights.specs, self._known.specs)
        if not (allow_nonfinite or self.job.spec.policy.allow_nonfinite):
            weights.check_finite()
        payload = self._engine.share(weights.memory)  # without the condition: it may have to wait for memory
        with self._changed:
            core = self._core
            core.raise_error()
            if core.is_closing:
                raise FleetClosed("the fleet was closed")
            number = core.offers.publish(weights, version, payload, core.slots.named(workers))
            core.waker.wake()
            return self.receipt(number, wait_s=wait_s)

    def receipt(self, version: int, *, wait_s: float = 0.0) -> WorkerReceipts:
        """State of a published version, as soon as every worker has applied or refused it, or after `wait_s`."""
        offers, number = self._core.offers, PolicyVersion(version)
        behind: list[WorkerHandle] = []
        with self._changed:
            if wait_s > 0:
                self._core.wait_for(lambda: offers.is_decided(number, behind), wait_s)
            return offers.receipt(number)

    def pause(self) -> None:
        """Stop every worker at its next vector step. Raises ControlTimeout; then the other workers stay paused."""
        core = self._core
        with self._changed:
            core.raise_error()
            core.set_paused(is_paused=True)
            core.waker.wake()
            # A worker that dies meanwhile is paused for good; its replacement gets no ticket.
            asked = core.slots.ask_all(messages.PlainCommand.PAUSE)
            self._quiesce.replies(asked, "pause")

    def resume(self) -> None:
        """Continue after `pause`. Has no effect on a running fleet."""
        with self._changed:
            self._core.set_paused(is_paused=False)
            self._core.slots.tell_all(messages.PlainCommand.RESUME)
            self._core.waker.wake()

    def drain(self) -> None:
        """Issue no more tickets: current batches are finished and accepted, `borrow` returns queued rounds, then None;
        workers end. A paused fleet continues to finish its batches. Returns at once.
        """
        with self._changed:
            self._core.raise_error()
            self._core.queue.complete(self._core.scheduler.drain())
            self.resume()

    def subscribe(self, listener: Listener) -> None:
        """Call a function with each event from now on, in order; see `FleetEvent`. The fleet's own thread calls it: it
        must return at once and not call the fleet. Its exceptions are logged.
        """
        self._core.events.subscribe(listener)

    def state(self) -> bytes:
        """Save every collector, the weights and the count of frames at a batch boundary. Batches that are not taken yet
        are counted but not saved: pause before the call, and take them after it. Raises ControlTimeout.
        """
        with self._changed, self._quiesce.between_batches():
            saved, published = self._quiesce.save(), self._core.offers.published()
        # Without the condition: this copies everything.
        *past, newest = [(version, to_bytes(weights)) for version, weights in published.items()] or [
            (INITIAL_VERSION, b"")
        ]
        return replace(saved, weights=newest[1], past=dict(past)).to_bytes()

    def restore(self, state: bytes | memoryview) -> None:
        """Continue from a `state()` of a fleet of the same job and as many workers. Drops batches that were not taken.
        With a dataset, the frame count stays the dataset's. Raises StateError or WeightsMismatch where it does not fit;
        nothing is changed unless a worker refuses, which the message names.
        """
        saved = FleetState.from_bytes(state)
        states = {name: self._engine.share(data) for name, data in saved.workers.items()}
        weights = []
        for version, blob in saved.publishes(after=self.version).items():
            verify(blob.specs, self._known.specs)
            weights.append((PolicyVersion(version), blob, self._engine.share(blob.memory)))
        with self._changed, self._quiesce.between_batches():
            self._quiesce.restore(saved, states, weights=weights)

    def seed(self, seed: int) -> tuple[str, ...]:
        """Reseed every worker at a batch boundary, with new environments and streams, as a new fleet with this seed
        would have, and so will their replacements. Before the first batch is taken, all batches are dropped unless a
        dataset has them, so that the seed determines the first batch. Open trajectories end with their last batch, and
        their ids are not used again; surplus frames of asynchronous environments are dropped. The policy, its weights
        and versions and the frame count stay. Returns the reseeded workers. Raises FleetError for a negative seed, or
        where all frames are collected; WorkerFailed where environments cannot be built again; ControlTimeout, though
        the seed holds nevertheless.
        """
        if not (isinstance(seed, int | np.integer) and seed >= 0):
            raise FleetError(f"seeds begin at 0, found {seed!r}; give another whole number")
        with self._changed, self._quiesce.between_batches():
            return self._quiesce.reseed(int(seed))

    def call(self, function: Callable[[WorkerPlace, WorkerOverrides, Collector], Any]) -> dict[str, Any]:
        """Call a function in each worker, at a batch boundary; it is pickled, and so is what it returns, by name of the
        worker. Raises StateError where it raised or a worker ended; FleetError where all frames are collected;
        ControlTimeout.
        """
        call = messages.Call(function=cloudpickle.dumps(function))
        with self._changed, self._quiesce.between_batches():
            found = self._quiesce.call(call)
        return {name: cloudpickle.loads(data) for name, data in found.items()}

    def resize(self, workers: int | Mapping[str, int | Collection[int]], *, wait: bool = True) -> None:
        """Start workers, or retire those with the highest index after they finish their current work, and wait for
        that. `workers`: in all, or by group; a list of indices instead of a size: exactly these. Raises FleetError for
        fewer than one worker or an unknown group; WorkerFailed and ControlTimeout where new workers do not start.
        """
        with self._changed:
            self._core.raise_error()
            self._life.resize(workers)
            self._core.waker.wake()
            if wait:
                self._quiesce.await_workers("to start or retire")

    def stats(self, *, workers: bool = True) -> FleetStats:
        """Current statistics; with `workers`, also of each worker, at a cost per worker."""
        with self._changed:
            stats = self._core.stats()
            handles = tuple(self._core.slots.workers) if workers else ()
        ordered = sorted(handles, key=lambda handle: handle.slot.key)
        return replace(stats, workers=tuple(handle.stats(is_paused=stats.paused) for handle in ordered))

    @property
    def version(self) -> PolicyVersion:
        """The newest published version. Never waits."""
        return self._core.offers.version

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that `maxStaleness` allows in a batch now; None without it."""
        bound = self.job.spec.collection.weights.max_staleness
        return None if bound is None else self._core.offers.common_version - bound

    @property
    def statistics(self) -> StatisticsBook | None:
        """Normalization statistics by version, for `cormorant_postproc.normalized`; None without `normalize`."""
        return self._core.statistics

    @property
    def silent_s(self) -> float:
        """Seconds since the last turn of the fleet's thread: more than a few mean that it hangs. Never waits."""
        return self._loop.silent_s

    @property
    def is_done(self) -> bool:
        """True when `totalFrames` have been accepted (and made durable, with a dataset)."""
        with self._changed:
            self._core.raise_error()
            return self._loop.is_done

    def wait_until_done(self, timeout_s: float) -> bool:
        """For jobs with a dataset and no queue: wait for the end. False after `timeout_s`."""
        with self._changed:
            self._core.wait_for(lambda: self._loop.is_done or self._core.error is not None, timeout_s)
            self._core.raise_error()
            return self._loop.is_done

    @property
    def found_frames(self) -> int:
        return self._core.found_frames

    @property
    def inherited_frames(self) -> int:
        """Part of `found_frames` reported by `inherit` or workers' pods, beyond `options.floor_frames`."""
        return self._core.inherited_frames

    def inherit(self, settled: Settled) -> None:
        """Count what an earlier head settled, as workers' pods tell when they join; nothing that is known already."""
        with self._changed:
            self._core.inherit(settled)
            self._core.waker.wake()

    @property
    def epoch(self) -> int:
        """Epoch of its seeds and trajectory ids: `options.epoch`, or a later one since a restore."""
        return self._core.lineage.epoch

    @property
    def spaces(self) -> tuple[Space, Space]:
        """Observation and action space of one environment."""
        return self._known.observation_space, self._known.action_space

    @property
    def specs(self) -> WeightSpecs:
        """Names, shapes and dtypes that published weights must have."""
        return self._known.specs

    @property
    def layout(self) -> Layout:
        """Layout of one worker's full batch."""
        return self._known.layout

    @property
    def _known(self) -> messages.Ready:
        if self._core.ready is None:
            raise FleetError("no worker has started yet")
        return self._core.ready

    # -- asking one worker -------------------------------------------------------------------------------------

    def peek(self, worker: str, *, column: int, leaf: int) -> Array:
        """Current observation of one environment, one read-only leaf of the layout's observation, at the cost of a
        copy. Its worker replies while stepping or paused; while a batch begins or ends it may be outdated or mix two
        rows. Raises NoSuchWorker, FleetError where it has not started, ControlTimeout after 2 s, for example while it
        saves its state.
        """
        with self._changed:
            self._core.raise_error()
            handle = self._core.slots.find(worker)
            if handle is None and worker not in (known := [slot.name for slot in self._core.slots.wanted]):
                raise NoSuchWorker(f"there is no worker {worker[:80]!r}; there are {', '.join(known)}")
            if handle is None or not handle.is_ready or handle.slot.is_server:
                raise FleetError(f"worker {worker} has no environments now; look at a ready worker that collects")
            look = messages.Look(column=column, leaf=leaf)
            data = self._quiesce.ask(handle, look, "show its environment", timeout_s=_PEEK_S)
        shown = self._known.layout.observation[leaf]
        return np.frombuffer(data, shown.dtype).reshape(shown.shape)

    def cached_versions(self) -> Mapping[str, PolicyVersion]:
        """By worker, the newest version that its pod kept from an earlier head, until it is fetched."""
        with self._changed:
            handles = tuple(self._core.slots.workers_in(SlotState.WORKING))
        return {h.name: h.cached_version for h in handles if h.cached_version > INITIAL_VERSION}

    def fetch_cached(self, worker: str) -> bytes:
        """Fetch, once, the weights that a worker's pod kept from an earlier head, for `weights.cached.read_cached`.
        Raises FleetError where it does not run, ControlTimeout after 60 s, StateError where its disk failed.
        """
        with self._changed:
            self._core.raise_error()
            handle = self._core.slots.find(worker)
            if handle is None or handle.slot.state is not SlotState.WORKING:
                raise FleetError(f"worker {worker} does not work now; its pod may offer its weights again")
            handle.cached_version = INITIAL_VERSION  # it is not offered again
            what = "hand over the weights that it kept"
            return self._quiesce.ask(handle, messages.PlainCommand.READ_CACHED, what, timeout_s=_FETCH_S)
