"""The life of a slot: one method per state that it enters. `slot.py` draws the states.

GONE -> (background) the worker has ended, and its dataset was asked -> every frame is accounted for -> VACANT
"""

import resource
import sys
import time
from collections.abc import Collection, Mapping
from functools import partial
from itertools import islice, takewhile

import structlog

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import CormorantError, DeviceUnavailable, FleetError, WorkerFailed
from cormorant_worker.fleet.core import FleetCore
from cormorant_worker.fleet.slot import Slot, SlotState, TicketOut, WorkerHandle
from cormorant_worker.fleet.stats import RestartReason
from cormorant_worker.fleet.transport import WorkerConnection
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker import messages

log = structlog.get_logger()

_MOST_STARTS = _MOST_GRANTS = _MOST_FINISHES = 24
"""In one turn; the others in the next, which follows at once: callers get the condition in between."""
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_OTHER_FILES = 256
"""File descriptors of the rest of the program: libraries, log files, connections of a head's clients."""
_MOST_FILES = 1 << 16
"""Some programs take time for each descriptor that they may have; hard limits can be a billion."""
_HEALTHY_S = 600.0
"""After which the failures of a worker that delivered a batch are counted from zero."""
_POD_ENDS_S = 10.0
"""A misplaced worker's pod has ended by then: the next worker is not placed there, too."""
_POD_LEAVES_S = 4.0
"""A leaving worker's pod has ended by then, and Ray has noticed."""


class SlotLife:
    """Guarded by the fleet's condition."""

    def __init__(self, core: FleetCore) -> None:
        self.seed = core.job.spec.collection.seed
        """Workers that start from now on derive their streams from it."""
        self.num_tickets = 0
        """Tickets that workers hold, or held when they ended and are not accounted for."""
        self._core = core

    @property
    def is_idle(self) -> bool:
        """True if no worker holds a ticket, and all former holders are accounted for."""
        return self.num_tickets == 0 and not self._core.slots.count(SlotState.GONE)

    def resize(self, workers: int | Mapping[str, int | Collection[int]]) -> None:
        """Set how many slots are wanted: see `Slots.resize`. Workers finish their tickets before they leave."""
        core = self._core
        check = partial(raise_file_limit, each=core.engine.descriptors_each)
        for slot in core.slots.resize(workers, check=check):
            if slot.worker is not None:
                self.let_go(slot.worker)
            slot.not_before = 0.0
            core.queue.complete(core.scheduler.forget_member(slot.key))
        core.size_blocks()

    # -- STARTING ----------------------------------------------------------------------------------------------

    def start_missing(self, now: float) -> None:
        """Start workers in vacant slots that do not have to wait."""
        core = self._core
        if core.error or core.is_closing or core.scheduler.is_done:
            return
        vacant = (slot for slot in core.slots.in_state(SlotState.VACANT) if now >= slot.not_before)
        # Workers wait for the first address of a server.
        may_start = not core.slots.serving or any(server.address is not None for server in core.slots.serving)
        due = (slot for slot in sorted(vacant, key=lambda slot: slot.key) if may_start or slot.is_server)
        for slot in islice(due, _MOST_STARTS):
            try:
                self._start(slot)
            except CormorantError as error:
                core.slots.vacate(slot)
                core.fail(error)
                return

    def _start(self, slot: Slot) -> None:
        core = self._core
        core.slots.move(slot, SlotState.STARTING)
        slot.not_before, slot.final_state = 0.0, None
        (group, index), made = slot.key, core.options.overrides
        # Groups of servers come last and do not count: with them and without, environments have the same seeds.
        groups = [known.name for known in sorted(core.job.spec.worker_groups, key=lambda known: known.serves)]
        # Workers that ask for the same kind of device are numbered through their groups.
        asked = {
            known.name: core.options.device or ("cuda" if known.device == "gpu" else "cpu")
            for known in core.job.spec.worker_groups
        }
        alike = takewhile(lambda name: name != group, (name for name in asked if asked[name] == asked[group]))
        number = index + sum(core.slots.sizes.get(name, 0) for name in alike)
        place = WorkerPlace(
            group=group,
            index=index,
            group_number=groups.index(group),
            num_groups=sum(not known.serves for known in core.job.spec.worker_groups),
            warmup_frames=0 if slot.is_server else core.lineage.warmup_of(slot, core.slots.collecting),
            env_restarts=core.env_failures.recent(slot.key),
            is_server=slot.is_server,
            servers=core.slots.servers_of(slot),
            max_threads=core.engine.cpus_for(core.num_slots),
            num_threads=core.ready.num_threads if core.ready is not None else 0,
            device=core.engine.device_of(asked[group], number),
            seed=self.seed,
        )
        first_free = core.dataset.attempts.get(slot.key, -1) + 1 if core.dataset is not None else 0
        # Trajectory ids of a batch: at most one per frame, and twice one per environment.
        batch_ids = core.scheduler.frames_per_batch + 2 * (core.ready.layout.num_envs if core.ready is not None else 0)
        start = messages.Start(
            job=core.job,
            place=core.lineage.begin(slot, place, first_free=first_free, batch_ids=batch_ids),
            frames_per_batch=core.scheduler.frames_per_batch,
            overrides=made[min(index, len(made) - 1)] if made else b"",
        )
        core.background.submit(lambda: core.engine.start(start), partial(self._started, slot))

    # -- BUILDING ----------------------------------------------------------------------------------------------

    def _started(self, slot: Slot, connection: WorkerConnection | Exception) -> None:
        core = self._core
        if isinstance(connection, Exception):
            core.slots.vacate(slot)
            core.fail(connection, what="start a worker")
            return
        handle = WorkerHandle(slot, connection, core.connections.stuck, last_progress=core.hang_detector.lived_s)
        core.slots.fill(slot, handle)
        core.connections.add(handle)
        if connection.place.servers != (servers := core.slots.servers_of(slot)):  # they have changed meanwhile
            handle.ask(messages.AssignServers(servers=servers))
        self.tell_spaces(handle)
        core.hang_detector.add(handle)
        core.counters.joined(slot.group)
        if not slot.is_wanted:
            self.let_go(handle)
        if core.is_closing:
            self.lose(handle, is_killed=True)  # it has nothing to lose yet

    def tell_spaces(self, handle: WorkerHandle) -> None:
        """Tell inference servers the spaces, once a worker has reported them."""
        if (ready := self._core.ready) is not None and handle.slot.is_server:
            handle.send(
                messages.BuildPolicy(observation_space=ready.observation_space, action_space=ready.action_space)
            )

    # -- READY -------------------------------------------------------------------------------------------------

    def welcome(self, handle: WorkerHandle, ready: messages.Ready | messages.ServerReady) -> None:
        """Accept a worker at its first observations, or a server. It replies once it has the current weights."""
        core, slot = self._core, handle.slot
        # From here on it is held to the hang limit, which its start may exceed.
        handle.last_progress = core.hang_detector.lived_s
        handle.cached_version = PolicyVersion(ready.kept_version)
        if slot.state is not SlotState.BUILDING:
            return  # it was told to finish, or will be
        core.slots.move(slot, SlotState.READY)
        if isinstance(ready, messages.Ready):
            core.inherit(ready.kept_settled)
            if core.scheduler.is_done:
                return  # the dataset had all frames already: it is sent home in this turn
            handle.send(messages.Begin(dataset_uri=core.dataset_uri, seal_after_s=core.options.seal_after_s))
        if not core.offers.offer_next(handle):
            # The reply puts it to work all the same.
            handle.offer = handle.ask(messages.PlainCommand.RESUME)
        if core.is_paused and not slot.is_server:
            handle.ask(messages.PlainCommand.PAUSE)
        event = "inference_server_ready" if slot.is_server else "worker_ready"
        log.info(event, worker=handle.name, seconds=round(time.monotonic() - handle.started, 2))

    # -- WORKING -----------------------------------------------------------------------------------------------

    def put_to_work(self, handle: WorkerHandle, reply: messages.Reply) -> None:
        """Let a worker with the current weights collect."""
        core, slot = self._core, handle.slot
        core.slots.move(slot, SlotState.WORKING)
        core.counters.put_to_work(handle)
        if not slot.is_server:
            core.scheduler.may_collect(slot.key, holds=0)
        core.events.note("worker_ready", worker=handle.name, version=handle.version)
        if reply.error:
            core.fail(WorkerFailed(f"worker {handle.name} refused the current weights: {reply.error}"))

    def hand_out_tickets(self) -> bool:
        """Issue the tickets that the scheduler allows. Returns whether there may be more."""
        core = self._core
        grants = core.scheduler.grants(
            num_workers=core.num_slots,
            ahead_of_consumer=core.queue.ahead_of_consumer,
            room=core.queue.room,
            most=_MOST_GRANTS,
        )
        for round_, key in grants:
            core.queue.free_a_block()
            slot, num_frames = core.slots[key], round_.frames[key]
            assert core.queue.blocks is not None
            assert slot.worker is not None, key
            block_index = core.queue.blocks.lend()
            ticket = messages.Ticket(
                number=next(slot.worker.numbers),
                block_index=block_index,
                num_frames=num_frames,
                version=core.offers.version_of(slot),
                episodes=core.episodes.take(num_frames) if core.episodes is not None else (),
            )
            self.num_tickets += 1
            slot.worker.tickets[ticket.number] = TicketOut(ticket, round_)
            slot.worker.send(ticket, core.queue.blocks.memory(block_index))
        return len(grants) >= _MOST_GRANTS

    def end_ticket(self, handle: WorkerHandle, number: int) -> TicketOut:
        self.num_tickets -= 1
        out = handle.tickets.pop(number)
        if handle.slot.state is SlotState.WORKING:
            self._core.scheduler.may_collect(handle.slot.key, holds=len(handle.tickets))
        return out

    # -- LEAVING, FINISHING ------------------------------------------------------------------------------------

    def let_go(self, handle: WorkerHandle) -> None:
        """Issue no more tickets to a worker, which ends when it holds none."""
        if handle.slot.state in (SlotState.BUILDING, SlotState.READY, SlotState.WORKING):
            self._core.slots.move(handle.slot, SlotState.LEAVING)
            self._core.scheduler.may_not_collect(handle.slot.key)

    def finish_idle(self) -> bool:
        """Tell idle workers to finish that leave, or have nothing left to do. Returns whether there may be more of
        them.
        """
        core = self._core
        is_done = core.scheduler.is_done
        # While a head drains, learners acknowledge what is queued: pods that stay keep the count for the next one.
        is_counting = core.scheduler.is_draining and core.options.waits_for_places and core.queue.unsettled_frames
        is_over = (is_done and not is_counting) or core.is_closing or core.error is not None
        staying = (SlotState.BUILDING, SlotState.READY, SlotState.WORKING) if is_over else ()
        # Servers end after the workers that need them.
        untold = (
            handle
            for handle in core.slots.workers_in(SlotState.LEAVING, *staying)
            if not handle.tickets
            and (handle.slot.state is SlotState.LEAVING or not (handle.slot.is_server and core.slots.has_collectors))
        )
        idle = tuple(islice(untold, _MOST_FINISHES))
        for handle in idle:
            core.slots.move(handle.slot, SlotState.FINISHING)
            core.scheduler.may_not_collect(handle.slot.key)  # frames found stale from now on are another worker's
            saves = is_done and not core.is_closing and core.episodes is None
            handle.send(messages.Finish(saves=saves))
        return len(idle) == _MOST_FINISHES

    # -- GONE --------------------------------------------------------------------------------------------------

    def end_hung(self, now: float) -> None:
        core = self._core
        for handle, silent_s, limit_s in core.hang_detector.turn(now, is_paused=core.is_paused):
            log.warning("worker_hung", worker=handle.name, seconds=round(silent_s, 1))
            doing = handle.connection.describe_doing()
            reason = f"made no progress for {limit_s:.0f} s and was killed ({doing})"
            self.lose(handle, reason=reason, kind="hang", is_killed=True)

    def fail(self, handle: WorkerHandle, failed: messages.Failed) -> None:
        core = self._core
        log.warning("worker_traceback", worker=handle.name, exception=failed.traceback)
        # No worker can run in its pod, which ends and has a successor: not a failure of the slot.
        is_misplaced = failed.kind == DeviceUnavailable.__name__ and core.options.waits_for_places
        is_final = failed.is_final and not (failed.may_pass and core.scheduler.landed_frames)
        if (is_final or core.ready is None) and not is_misplaced:
            error = WorkerFailed(f"worker {handle.name}: {failed.message}", kind=failed.kind)
            error.add_note(failed.traceback)
            core.fail(error)
        self.lose(handle, reason=f"failed: {failed.message}", kind="error", is_misplaced=is_misplaced)

    def lose(
        self,
        handle: WorkerHandle,
        *,
        reason: str = "",
        kind: RestartReason = "crash",
        is_killed: bool = False,
        is_misplaced: bool = False,
    ) -> None:
        """Handle a worker that has ended or must end: its slot is free once its frames are accounted for."""
        core, slot, connection = self._core, handle.slot, handle.connection
        has_finished = slot.final_state is not None

        def see_off() -> tuple[str, int | None]:
            """Returns how it ended (empty: told before) and its durable frames (None: there is no dataset)."""
            if is_killed:
                connection.kill()
            how = connection.describe_end()
            connection.close()
            # An inference server writes no part: ending it would make one.
            part, dataset = connection.place.attempt_name, None if slot.is_server else core.dataset
            durable_frames = dataset.durable_frames(part, is_over=has_finished) if dataset is not None else None
            return "" if reason or has_finished else how, durable_frames

        bury = partial(self._bury, handle, reason=reason, kind=kind, is_misplaced=is_misplaced)
        core.slots.move(slot, SlotState.GONE)
        core.connections.remove(handle)
        core.background.submit(see_off, bury)
        core.scheduler.may_not_collect(slot.key)
        core.slots.set_address(slot, None)
        core.counters.parted(handle)

    # -- VACANT, RETIRED ---------------------------------------------------------------------------------------

    def _bury(
        self,
        handle: WorkerHandle,
        seen: tuple[str, int | None] | Exception,
        *,
        reason: str,
        kind: RestartReason,
        is_misplaced: bool,
    ) -> None:
        """A worker has ended: keep what it finished, take back what it did not, and have it replaced."""
        core, slot = self._core, handle.slot
        core.slots.vacate(slot)
        if handle.pod_ends:
            slot.not_before = time.monotonic() + _POD_LEAVES_S
        if isinstance(seen, Exception):
            core.fail(seen, what="see a worker off")
            seen = str(seen), handle.durable_frames if core.dataset is not None else None
        how, durable_frames = seen
        reason = reason or how
        is_first, has_finished = core.ready is None, slot.final_state is not None
        core.counters.follow(handle)
        is_closing = core.is_closing
        # Asynchronous environments may have stepped past the last ticket of a worker that was told to end.
        dropped = "drain" if is_closing or has_finished else "crash"
        again, hopeless = self._settle(handle, durable_frames=durable_frames, reason=dropped)
        if hopeless and not is_closing:
            core.fail(WorkerFailed(f"worker {handle.name} {reason}; {hopeless}"))
        if not slot.is_wanted:
            core.lineage.give_up(slot)
        is_filled_again = slot.is_wanted and not is_closing and not core.scheduler.is_draining
        core.queue.complete(core.scheduler.forget_member(slot.key, only_preempted=is_filled_again))
        if has_finished and not again:
            return
        if not is_closing and core.error is None:
            log.warning("worker_lost", worker=handle.name, reason=reason, frames_to_collect_again=again)
            core.events.note("worker_lost", worker=handle.name, reason=reason, frames=again)
            core.counters.replaced(slot.group, kind)
            self._plan_replacement(handle, reason, is_first=is_first, is_misplaced=is_misplaced)

    def _settle(self, handle: WorkerHandle, *, durable_frames: int | None, reason: str) -> tuple[int, str]:
        """Account for everything that an ended worker has stepped. Its part of the dataset (None: there is none) has
        `durable_frames`: the last batch though the fleet has not heard of it, and not batches that it did hear of.
        Returns frames that are collected again, and why an evaluation cannot go on; empty: it can.
        """
        core, slot, again, hopeless = self._core, handle.slot, 0, ""
        for number in tuple(handle.tickets):
            out = self.end_ticket(handle, number)
            again += core.scheduler.lost(out.round, slot.key)
            if core.episodes is not None:
                hopeless = core.episodes.give_back(out.ticket.episodes)
            assert core.queue.blocks is not None
            core.queue.blocks.give_back(out.ticket.block_index)
        kept = handle.landed_frames if durable_frames is None else durable_frames
        unheard = kept - handle.landed_frames
        if unheard < 0:
            core.scheduler.accepted_frames += unheard
        elif unheard > 0:
            core.queue.complete(core.scheduler.found_durable(slot.key, unheard))
        slot.written += unheard
        core.queue.count_dropped(reason, max(0, handle.stepped_frames - kept - handle.dropped_frames))
        return max(0, again - unheard), hopeless

    def _plan_replacement(self, handle: WorkerHandle, reason: str, *, is_first: bool, is_misplaced: bool) -> None:
        """The next worker of a slot starts at once, after a while, or never: then the fleet cannot go on."""
        core, slot, now = self._core, handle.slot, time.monotonic()
        # A pod that ends while its worker starts says nothing of the manifest.
        if is_first and not core.options.waits_for_places:
            core.fail(WorkerFailed(f"worker {handle.name} {reason}"))
            return
        if is_misplaced:
            core.misplaced = f"worker {handle.name} {reason}"
            slot.not_before = now + _POD_ENDS_S
            return
        was_healthy = (handle.landed_frames > 0 or slot.is_server) and now - handle.started >= _HEALTHY_S
        slot.failures = 1 if was_healthy else slot.failures + 1
        limit = core.job.spec.run_policy.max_restarts_per_slot
        if slot.failures > limit:
            spent = f"the limit on restarts in a row is {limit} (runPolicy.maxRestartsPerSlot, in Python max_restarts)"
            core.fail(WorkerFailed(f"worker {handle.name} {reason}; {spent}"))
        elif slot.failures > 1:
            slot.not_before = now + min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (slot.failures - 1))


def raise_file_limit(num_workers: int, *, each: int) -> None:
    """Raise, never lower, this process's soft limit on open files. Raises FleetError if the hard limit is too low for
    so many workers with `each` descriptors.
    """
    needed = num_workers * each + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        raise FleetError(
            f"{num_workers} workers need {needed:,} open files ({each} each, and {_OTHER_FILES}), this process may "
            f"have {hard:,} (ulimit -Hn); raise that limit, or start {max(0, (hard - _OTHER_FILES) // each):,} workers"
        )
    wanted = min(most, max(needed, _MOST_FILES))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
