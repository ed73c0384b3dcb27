"""The local fleet: worker processes of this machine, batches in shared memory. What `cormorant run` uses.

One thread owns the workers: it reads their sockets, hands out tickets, replaces the dead. Everything it knows is
guarded by one condition, on which callers (the consumer of batches, control calls) wait with a limit.

    consumers -- borrow ---> queue <--- accept --- rounds <--- Sealed --- workers
                               |                                             ^
                               +--- slots given back ---> tickets -----------+
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog
import torch

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Layout
from cormorant_worker.errors import FleetError, StaleWeights
from cormorant_worker.fleet.background import BackgroundTasks
from cormorant_worker.fleet.batch_queue import BatchQueue
from cormorant_worker.fleet.events import Events, Listener
from cormorant_worker.fleet.eyes import Eyes
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.inheritance import Inheritance
from cormorant_worker.fleet.lending import Lending
from cormorant_worker.fleet.loan import Batch, Loan
from cormorant_worker.fleet.local.engine import LocalEngine
from cormorant_worker.fleet.options import FleetOptions, default_workers
from cormorant_worker.fleet.protocol import FleetStats, Receipt
from cormorant_worker.fleet.quiesce import Quiesce
from cormorant_worker.fleet.scheduler import Scheduler
from cormorant_worker.fleet.selector import ConnectionSelector, Event
from cormorant_worker.fleet.stats import fleet_stats, with_workers
from cormorant_worker.fleet.transport import Engine, Payload
from cormorant_worker.fleet.waker import Waker
from cormorant_worker.fleet.worker_pool import WorkerPool
from cormorant_worker.spaces import Space
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.file import in_models
from cormorant_worker.weights.staged import PolicyVersion, Weights, WeightSpecs, specs_of_tensors, verify
from cormorant_worker.worker.messages import Ready

if TYPE_CHECKING:
    from tensordict import TensorDict

log = structlog.get_logger()

_POLL_S = 0.2
_TURN_S = 0.001
"""What has come is dealt with for so long at once; then callers may have the condition."""
_MOST_OFFERS = 48
"""In one turn."""
_BREATH_S = 0.0002
_CLOSE_S = 20.0
"""For workers that are being killed, the last thing a fleet waits for."""


class Fleet:
    """Collectors in processes of this machine. Use as a context manager; methods may be called from any thread."""

    def __init__(self, job: CollectorJob, options: FleetOptions | None = None, *, engine: Engine | None = None) -> None:
        """Start the workers and wait until all of them stand at their first observation.

        Raises:
            WorkerFailed: a worker cannot start; the message is the environment's, the policy's or the weights'.
            DatasetError: the manifest's dataset cannot be opened or belongs to another job.
            DeviceUnavailable: a gpu group, and no CUDA device.
        """
        self.job = job
        self.options = options or FleetOptions()
        spec = job.spec
        self._engine = engine or LocalEngine()
        self._engine.check_devices(job, self.options.device)
        self._schedule = Scheduler(
            mode=spec.collection.mode,
            frames_per_batch=spec.collection.frames_per_batch,
            total_frames=spec.collection.total_frames,
            max_staleness=spec.collection.weights.max_staleness,
            preemptive_threshold=spec.collection.preemptive_threshold,
        )
        queue = spec.output.queue
        self._events = Events()
        self._deliveries = BatchQueue(
            self._schedule,
            capacity=queue.capacity_batches if queue else 0,
            drops_oldest=queue is not None and queue.on_full == "drop_oldest",
            has_dataset=spec.output.dataset is not None,
            events=self._events,
        )
        self._changed = threading.Condition()
        """Guards everything here, in the crew, the schedule and the deliveries; notified whenever it changes."""
        self._bell = Waker()
        self._porter = BackgroundTasks(self._bell.ring)
        self._crew = WorkerPool(
            job, self.options, self._engine, self._schedule, self._deliveries, self._events, self._porter
        )
        self._taken: Loan | None = None
        """What `take` gave out last."""
        self._waiting_room = ConnectionSelector(self._crew, self._bell)
        self._turned_at = time.monotonic()
        self._lending = Lending(
            self._changed,
            self._crew,
            self._schedule,
            self._deliveries,
            storing_device=self.options.storing_device,
            wake=self._bell.ring,
        )
        self._standstill = Quiesce(
            self._changed, self._crew, self._schedule, self._deliveries, self.options, wake=self._bell.ring
        )
        self.eyes = Eyes(self._changed, self._crew, self._standstill)
        self.inheritance = Inheritance(self._changed, self._crew, self._standstill)
        self._has_told_failure = False
        self._is_done = False
        self._is_closed = False
        self._engine.open(self._waiting_room.note_news)
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._crew.resize(self.options.workers or default_workers(job))
        self._thread.start()
        try:
            with self._changed:
                self._standstill.await_crew("to start")
        except BaseException:
            self.close()
            raise

    # -- life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let batches under way land, close the datasets, end the workers: at most `drain_timeout_s`, then kill.

        What was queued and not taken is given up. May be called twice.
        """
        crew = self._crew
        with self._changed:
            if self._is_closed:
                return
            crew.is_closing = True
            began = time.monotonic()
            crew.open_gates()
            crew.kill_starting()
            self._bell.ring()
            if not self._standstill.wait_until(lambda: crew.is_idle, began + self.options.drain_timeout_s * 0.5):
                crew.stop_stepping()
            self._standstill.wait_until(lambda: crew.is_empty, began + self.options.drain_timeout_s * 0.9)
            self._is_closed = True
            self._bell.ring()
            self._changed.notify_all()
        self._thread.join(timeout=10)
        for member in tuple(crew.members.values()):
            log.warning("worker_killed", worker=member.name, reason="it did not end in time")
            member.link.close()
        for _, see_off in crew.parted:
            see_off()
        # Those that were being started or seen off meanwhile.
        deadline = time.monotonic() + _CLOSE_S
        while not self._porter.is_idle and time.monotonic() < deadline:
            with self._changed:
                self._porter.settle()
            time.sleep(_POLL_S / 10)
        self._porter.close()
        self._bell.close()
        self._waiting_room.close()
        crew.members.clear()
        crew.shelf.clear()
        if crew.store is not None:
            crew.store.close()
        if self._deliveries.blocks is not None:
            self._deliveries.blocks.close()
        self._engine.close()

    def kill(self) -> None:
        """End all workers at once, whatever they are doing. May be called twice, and while another thread closes."""
        for member in (*tuple(self._crew.members.values()), *tuple(self._crew.gone.values())):
            member.link.kill()

    def __enter__(self) -> "Fleet":
        """Use as a context manager to close the fleet."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- batches -----------------------------------------------------------------------------------------------

    def batches(self, *, copy: bool = False) -> Iterator["TensorDict"]:
        """Batches until `totalFrames` are delivered, or for ever.

        Args:
            copy: by default the tensors are views of shared memory, valid until the next batch is taken; True makes
                them yours.

        Yields:
            TensorDict `[B, T]` in async mode, `[W*B, T]` in sync mode; see `batch.to_tensordict`.

        Raises:
            WorkerFailed: a worker failed for good.
            FleetClosed: the fleet was closed meanwhile.
        """
        while (batch := self.take(copy=copy)) is not None:
            yield batch.tensordict

    def take(self, *, copy: bool = False, timeout_s: float | None = None) -> Batch | None:
        """Take the next batch, giving the last one's memory back.

        Args:
            copy: make the tensors yours instead of views that the next `take` invalidates.
            timeout_s: how long to wait; None waits as long as workers make progress (each of their waits is limited).

        Returns:
            The batch, or None when `totalFrames` have been delivered.

        Raises:
            ControlTimeout: no batch came in time.
            WorkerFailed: a worker failed for good.
            FleetClosed: the fleet was closed meanwhile.
        """
        loan = self._take_next(timeout_s)
        if loan is None:
            return None
        tensordict = loan.tensordict(copy=copy)
        if copy:
            loan.copied()
        return Batch(tensordict=tensordict, num_frames=loan.num_frames, min_version=loan.min_version)

    def skip(self, *, timeout_s: float | None = None) -> int:
        """Take the next batch without looking at it: its number of frames, or 0 when all have been delivered.

        Raises:
            ControlTimeout, WorkerFailed, FleetClosed: as `take`.
        """
        loan = self._take_next(timeout_s)
        return 0 if loan is None else loan.num_frames

    def _take_next(self, timeout_s: float | None) -> Loan | None:
        if self._taken is not None:
            self._taken.release()
        self._taken = self.borrow(timeout_s=timeout_s)
        return self._taken

    def borrow(self, *, timeout_s: float | None = None) -> Loan | None:
        """Borrow the next round. Any number may be out at a time; those that nobody gives back hold up the workers,
        because each of them counts against `output.queue.capacityBatches` (with `onFull: drop_oldest`: only once they
        have all memory). A loan is never dropped.

        Args:
            timeout_s: how long to wait; None waits as long as workers make progress (each of their waits is limited).

        Returns:
            The loan, or None when `totalFrames` have been delivered, or all that a drained fleet had.

        Raises:
            ControlTimeout: no round came in time.
            WorkerFailed: a worker failed for good.
            FleetClosed: the fleet was closed meanwhile.
        """
        if self.job.spec.output.queue is None:
            raise FleetError("the manifest has no output.queue: its frames go to the dataset alone; add queue: {}")
        return self._lending.borrow(timeout_s=timeout_s, is_over=lambda: self._is_done and self._schedule.is_done)

    # -- control -----------------------------------------------------------------------------------------------

    def publish(
        self,
        weights: Mapping[str, torch.Tensor] | Weights | WeightsBlob,
        *,
        version: int | None = None,
        wait_s: float = 0.0,
        workers: Sequence[str] = (),
    ) -> Receipt:
        """Hand new weights to every worker; each applies them at its next batch boundary, all of them or none.

        Args:
            weights: a state dict of the policy, or state dicts by model name; or a blob that was checked, which is
                handed on as it is: nobody may write to it any more.
            version: higher than any before; by default the next number.
            wait_s: how long to wait for every worker to act with them; 0 returns at once.
            workers: names of those that alone get them, and their replacements; empty: everybody. `state()` holds what
                everybody has, and staleness is measured by it.

        Returns:
            Who acts with this version already, who has it staged, and who refused it.

        Raises:
            WeightsError: these are no weights.
            WeightsMismatch: the tensors do not fit the policy; nothing was published.
            StaleWeights: the version is not higher than the published one.
            FleetError: no such worker; nothing was published.
        """
        blob = weights if isinstance(weights, WeightsBlob) else self._blob_of(in_models(weights))
        # Without the condition: whoever shares them may have to wait for memory.
        verify(blob.specs, self._known.specs)
        payload = self._engine.share(blob.memory)
        try:
            with self._changed:
                return self._publish(blob, payload, version, wait_s, workers)
        except BaseException:
            if not self._crew.shelf.has(payload):
                payload.close()
            raise

    def _publish(
        self, blob: WeightsBlob, payload: Payload, version: int | None, wait_s: float, workers: Sequence[str]
    ) -> Receipt:
        crew = self._crew
        crew.raise_error()
        number = PolicyVersion(crew.version + 1 if version is None else version)
        if number <= crew.version:
            raise StaleWeights(f"weights version {number} is not newer than {crew.version}; publish a higher one")
        crew.publish(blob, number, payload, crew.places.of(workers) if workers else None)
        self._bell.ring()
        if wait_s > 0:
            behind = crew.offers.await_version(number)
            try:
                self._standstill.wait_until(lambda: not behind, time.monotonic() + wait_s)
            finally:
                crew.offers.forget_version(number)
        return self._receipt(number)

    def _blob_of(self, weights: Weights) -> WeightsBlob:
        # Before anything is copied, and without the condition: it takes as long as copying takes.
        verify(specs_of_tensors(weights), self._known.specs)
        return WeightsBlob.of(weights)

    def receipt(self, version: int) -> Receipt:
        """Who acts with a published version by now."""
        with self._changed:
            return self._receipt(PolicyVersion(version))

    def pause(self) -> None:
        """Stop stepping at the next vector step of every worker; batches under way are kept and go on at `resume`.

        Raises:
            ControlTimeout: a worker did not stop in time; the others stay paused.
        """
        with self._changed:
            self._crew.raise_error()
            if not self._crew.is_paused:
                self._events.note("paused")
            self._crew.is_paused = True
            self._bell.ring()
            # A worker that dies meanwhile is paused for good; its replacement gets no ticket.
            still = self._standstill
            still.answers(still.ask_all("pause"), "pause", timeout_s=self.options.control_timeout_s)

    def resume(self) -> None:
        """Go on after `pause`. Does nothing when the fleet runs."""
        with self._changed:
            self._resume()

    def _resume(self) -> None:
        if self._crew.is_paused:
            self._events.note("resumed")
        self._crew.is_paused = False
        self._crew.open_gates()
        self._bell.ring()

    def drain(self) -> None:
        """Hand out no more tickets: what is under way lands and is accepted, `borrow` and `take` give what is queued,
        then None; workers end. A paused fleet goes on to finish its batches. Returns at once.
        """
        with self._changed:
            self._crew.raise_error()
            self._deliveries.complete(self._schedule.drain())
            self._resume()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have a function told everything that happens from now on, in order; see `FleetEvent`.

        It is called by the fleet's own thread: it must return at once and not call the fleet. What it raises is logged.

        Returns:
            What ends it.
        """
        return self._events.subscribe(listener)

    def state(self) -> bytes:
        """Save every collector, the weights and the count of frames at a batch boundary. Batches that are not taken yet
        are counted and not saved: pause before, and take them afterwards.

        Raises:
            ControlTimeout: batches under way did not end in time.
        """
        with self._changed, self._standstill.between_batches():
            return self._standstill.save().to_bytes()

    def restore(self, state: bytes) -> None:
        """Go on from a `state()` of a fleet of the same job and as many workers.

        What this fleet has collected and nobody has taken is dropped. With a dataset, the count of frames stays that of
        the dataset.

        Raises:
            StateError: it does not fit; nothing is changed unless a worker refuses, which its message names.
        """
        saved = FleetState.from_bytes(state)
        with self._changed, self._standstill.between_batches():
            self._standstill.restore(saved, publish=lambda blob, version: self.publish(blob, version=version))

    def seed(self, seed: int) -> tuple[str, ...]:
        """Have every worker begin anew from another seed, at a batch boundary: with new environments and streams, as a
        new fleet with this seed would, and so will their replacements. Batches under way are finished first, even in
        a paused fleet; before the first batch is taken they are dropped, unless a dataset has them: the seed rules
        from the first batch on.

        Open trajectories end where their last batch did, under ids that do not come again; what asynchronous
        environments were ahead of it is dropped. The policy, its weights and versions and the count of frames stay.

        Returns:
            The workers that have begun anew.

        Raises:
            FleetError: a negative seed, or everything is collected.
            WorkerFailed: environments cannot be built again.
            ControlTimeout: batches under way did not end in time, or environments were not built in
                `startup_timeout_s`; the seed holds nevertheless.
        """
        if seed < 0:
            raise FleetError(f"seeds begin at 0, found {seed}; give another")
        with self._changed, self._standstill.between_batches():
            return self._standstill.reseed(seed)

    def resize(self, workers: int | Mapping[str, int | Collection[int]], *, wait: bool = True) -> None:
        """Start workers, or retire those with the highest index: they finish what they hold first.

        Args:
            workers: of the whole fleet, or by group; groups that are not named keep their size. A group's indices
                instead of its size: exactly these.
            wait: until all of them have started or ended.

        Raises:
            FleetError: fewer than one worker, or no such group.
            WorkerFailed, ControlTimeout: new workers did not start.
        """
        with self._changed:
            self._crew.raise_error()
            self._crew.resize(workers)
            self._bell.ring()
            if wait:
                self._standstill.await_crew("to start or retire")

    def retire(self, name: str) -> None:
        """Let a worker finish what it holds and end; its place stays empty until its group's size is raised. Returns
        at once.

        Raises:
            FleetError: no such worker, or it is the last one.
        """
        with self._changed:
            self._crew.raise_error()
            self._crew.retire(name)
            self._bell.ring()

    def stats(self, *, workers: bool = True) -> FleetStats:
        """What is going on.

        Args:
            workers: with each of them, which costs as much as there are; all else does not.
        """
        with self._changed:
            found = fleet_stats(self._crew, self._schedule, self._deliveries)
            members = tuple(self._crew.members.values()) if workers else ()
        return with_workers(found, members)

    @property
    def version(self) -> PolicyVersion:
        """The newest published version. Costs nothing, and never waits."""
        return self._crew.version

    @property
    def silent_s(self) -> float:
        """Seconds since the fleet's own thread turned last: more than a few say that it hangs. Never waits."""
        return 0.0 if self._is_closed else time.monotonic() - self._turned_at

    @property
    def is_done(self) -> bool:
        """True when `totalFrames` have been accepted (and made durable, with a dataset).

        Raises:
            WorkerFailed: a worker failed for good.
        """
        with self._changed:
            self._crew.raise_error()
            return self._is_done

    def wait_until_done(self, timeout_s: float) -> bool:
        """For jobs with a dataset and no queue: wait for the end. False after `timeout_s`.

        Raises:
            WorkerFailed: a worker failed for good.
        """
        with self._changed:
            self._standstill.wait_until(
                lambda: self._is_done or self._crew.error is not None, time.monotonic() + timeout_s
            )
            self._crew.raise_error()
            return self._is_done

    @property
    def found_frames(self) -> int:
        """Frames that the dataset had when this fleet opened it."""
        return self._crew.found_frames

    @property
    def spaces(self) -> tuple[Space, Space]:
        """Observation and action space of one environment."""
        return self._known.observation_space, self._known.action_space

    @property
    def specs(self) -> WeightSpecs:
        """What published weights must look like."""
        return self._known.specs

    @property
    def layout(self) -> Layout:
        """What a full batch of one worker holds."""
        return self._known.layout

    # -- the fleet's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        room = self._waiting_room
        try:
            has_more = True
            while True:
                ready = room.wait(0.0 if has_more else _POLL_S)
                with self._changed:
                    if self._is_closed:
                        return
                    has_more = self._one_turn(ready)
                self._events.tell()  # without the condition: a listener must not hold callers up
                if has_more:
                    time.sleep(_BREATH_S)  # whoever waits for the condition gets it
        except Exception as error:
            log.exception("fleet_thread_failed")
            with self._changed:
                self._crew.error = FleetError(f"the fleet's thread failed: {type(error).__name__}: {error}")
                self._note_failure()
                self._changed.notify_all()
        finally:
            self._events.tell()

    def _one_turn(self, ready: list[Event]) -> bool:
        """Deal with what has come, and with everything that may be due: new workers, the dead and hung, tickets, the
        end. Returns whether there is more, for the next turn.
        """
        crew, room = self._crew, self._waiting_room
        now = self._turned_at = time.monotonic()
        self._bell.hush()
        has_more = room.deal_with(ready, until=now + _TURN_S)
        self._porter.settle()
        crew.start_missing(now)
        crew.watch.turn(now, is_paused=crew.is_paused)
        self._deliveries.accept()
        crew.tally.look(is_full=bool(self._deliveries.blocks) and not self._deliveries.room)
        crew.offers.send_due(_MOST_OFFERS)
        has_more |= crew.offers.has_due
        if not (crew.is_paused or crew.is_closing or self._standstill.is_wanted or crew.error is not None):
            has_more |= crew.grant_some()
        has_more |= crew.finish_idle()
        if self._schedule.is_done and self._deliveries.is_drained:
            self._is_done = crew.store is None or crew.is_empty
        self._note_failure()
        room.follow_crew()
        self._changed.notify_all()
        return has_more

    def _note_failure(self) -> None:
        if self._crew.error is not None and not self._has_told_failure:
            self._has_told_failure = True
            self._events.note("failed", reason=str(self._crew.error))

    # -- waiting -----------------------------------------------------------------------------------------------

    @property
    def _known(self) -> Ready:
        if self._crew.ready is None:
            raise FleetError("no worker has started yet")
        return self._crew.ready

    def _receipt(self, version: PolicyVersion) -> Receipt:
        given = [m for m in self._crew.serving() if self._crew.shelf.version_of(m.place) >= version]
        serving = sorted(given, key=lambda member: member.name)
        behind = [m for m in serving if m.version < version]
        return Receipt(
            version=version,
            applied=tuple(m.name for m in serving if m.version >= version),
            waiting=tuple(m.name for m in behind if m.refusal[0] != version),
            refused={m.name: m.refusal[1] for m in behind if m.refusal[0] == version},
        )
