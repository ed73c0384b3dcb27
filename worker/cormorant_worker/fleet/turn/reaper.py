"""Ends workers: tells idle ones to finish, sees the dead off, and accounts for every frame that they stepped.

worker -> lost -> (background) ended, and its dataset asked -> accounted for -> replaced, or not
"""

import time
from collections.abc import Collection
from functools import partial
from itertools import islice

import structlog

from cormorant_worker.errors import DeviceUnavailable, WorkerFailed
from cormorant_worker.fleet.background import SeenOff, see_off
from cormorant_worker.fleet.bookkeeping.core import FleetCore
from cormorant_worker.fleet.bookkeeping.counters import RestartReason
from cormorant_worker.fleet.bookkeeping.job_facts import describe_env
from cormorant_worker.fleet.bookkeeping.scheduler import Slot
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.fleet.turn.bootstrap import Bootstrap
from cormorant_worker.fleet.turn.tickets import Tickets
from cormorant_worker.worker.messages import Failed, Finish

log = structlog.get_logger()

_MOST_FINISHES = 24
"""In one turn."""


class Reaper:
    """Guarded by the fleet's condition."""

    def __init__(self, core: FleetCore, bootstrap: Bootstrap, tickets: Tickets) -> None:
        self.final_states: dict[Slot, bytes] = {}
        """Collectors' states of workers that finished; empty for those that could not be saved."""
        self._core, self._bootstrap, self._tickets = core, bootstrap, tickets

    # -- in order ----------------------------------------------------------------------------------------------

    def give_up(self, slots: Collection[Slot]) -> None:
        """These slots are not filled again. Their workers finish what they hold."""
        core = self._core
        for slot in slots:
            if (handle := core.pool.workers.get(slot)) is not None:
                self.let_go(handle)
            core.replacements.forget(slot)
            core.servers.retire((slot,))
            core.queue.complete(core.scheduler.forget_member(slot))
        self._bootstrap.size_blocks()

    def let_go(self, handle: WorkerHandle) -> None:
        """A worker gets no more tickets, and ends when it holds none."""
        self._core.pool.let_go(handle)
        self._core.scheduler.may_not_collect(handle.slot)

    def finish_idle(self) -> bool:
        """Tell workers without a ticket to finish, when they leave or nothing is left to do. Returns whether there may
        be more of them.
        """
        core = self._core
        is_done, lifecycle = core.scheduler.is_done, core.lifecycle
        is_over = is_done or lifecycle.is_closing or lifecycle.error is not None
        # Servers end after the workers that need them.
        untold = (
            handle
            for handle in core.pool.untold(only_leaving=not is_over)
            if handle.is_leaving or not (handle.is_server and core.pool.has_collectors)
        )
        idle = tuple(islice(untold, _MOST_FINISHES))
        for handle in idle:
            core.pool.told_to_finish(handle)
            core.scheduler.may_not_collect(handle.slot)  # frames found stale from now on are another worker's
            handle.send(Finish(saves=is_done and not lifecycle.is_closing))
        return len(idle) == _MOST_FINISHES

    def finished(self, handle: WorkerHandle, state: bytes) -> None:
        handle.has_finished = True
        self.final_states[handle.slot] = state

    # -- out of order ------------------------------------------------------------------------------------------

    def kill_starting(self) -> None:
        """End workers that have nothing to lose yet."""
        for handle in tuple(self._core.pool.workers.values()):
            if not handle.is_ready:
                self.lose(handle, is_killed=True)

    def end_hung(self, now: float) -> None:
        core = self._core
        for handle, silent_s, limit_s in core.hang_detector.turn(now, is_paused=core.lifecycle.is_paused):
            log.warning("worker_hung", worker=handle.name, seconds=round(silent_s, 1))
            doing = handle.connection.describe_doing()
            reason = f"made no progress for {limit_s:.0f} s and was killed ({doing})"
            self.lose(handle, reason=reason, kind="hang", is_killed=True)

    def fail(self, handle: WorkerHandle, failed: Failed) -> None:
        log.warning("worker_traceback", worker=handle.name, exception=failed.traceback)
        handle.is_misplaced = failed.kind == DeviceUnavailable.__name__ and self._core.options.waits_for_places
        is_final = failed.is_final and not (failed.may_pass and self._core.scheduler.landed_frames)
        if (is_final or self._bootstrap.ready is None) and not handle.is_misplaced:
            error = WorkerFailed(f"worker {handle.name}: {failed.message}", kind=failed.kind)
            error.add_note(failed.traceback)
            self._core.lifecycle.fail(error)
        self.lose(handle, reason=f"failed: {failed.message}", kind="error")

    def lose(
        self, handle: WorkerHandle, *, reason: str = "", kind: RestartReason = "crash", is_killed: bool = False
    ) -> None:
        """A worker has ended, or has to: its slot is free once it is accounted for."""
        core = self._core
        is_told = bool(reason) or handle.has_finished
        part = handle.connection.place.attempt_name
        ask = partial(core.dataset.durable_frames, part) if core.dataset is not None else None

        def be_seen_off() -> None:
            core.background.submit(
                lambda: see_off(handle.connection, is_killed=is_killed, is_told=is_told, durable_frames=ask),
                lambda seen: self._bury(handle, seen, reason=reason, kind=kind),
            )

        core.pool.lose(handle, be_seen_off)
        core.hang_detector.remove(handle.slot)
        core.scheduler.may_not_collect(handle.slot)
        core.offers.gone(handle.slot)
        core.servers.gone(handle.slot)
        core.counters.parted(handle)

    def _bury(self, handle: WorkerHandle, seen: "SeenOff | Exception", *, reason: str, kind: RestartReason) -> None:
        """A worker has ended: keep what it finished, take back what it did not, and have it replaced."""
        core, slot = self._core, handle.slot
        core.pool.accounted_for(slot)
        if isinstance(seen, Exception):
            core.lifecycle.fail(seen, what="see a worker off")
            seen = SeenOff(how=str(seen), durable_frames=handle.durable_frames if core.dataset is not None else None)
        reason = reason or seen.how
        is_first = self._bootstrap.ready is None
        if is_first and not handle.has_finished and kind == "crash":
            reason += f" {describe_env(core.job)}: check its arguments"
        core.counters.follow(handle)
        is_closing, is_wanted = core.lifecycle.is_closing, slot in core.pool.slots
        # Asynchronous environments may have stepped past the last ticket of a worker that was told to end.
        dropped = "drain" if is_closing or handle.has_finished else "crash"
        again, hopeless = self._settle(handle, durable_frames=seen.durable_frames, reason=dropped)
        if hopeless and not is_closing:
            core.lifecycle.fail(WorkerFailed(f"worker {handle.name} {reason}; {hopeless}"))
        if not is_wanted:
            core.lineage.give_up(slot)
        is_filled_again = is_wanted and not is_closing and not core.scheduler.is_draining
        core.queue.complete(core.scheduler.forget_member(slot, only_preempted=is_filled_again))
        if handle.has_finished and not again:
            return
        if not is_closing and core.lifecycle.error is None:
            log.warning("worker_lost", worker=handle.name, reason=reason, frames_to_collect_again=again)
            core.events.note("worker_lost", worker=handle.name, reason=reason, frames=again)
            core.counters.replaced(handle.group, kind)
            self._replace(handle, reason, is_first=is_first)

    def _settle(self, handle: WorkerHandle, *, durable_frames: int | None, reason: str) -> tuple[int, str]:
        """Account for everything that a worker has stepped. It has ended: its part of the dataset does not grow.
        `durable_frames`: frames in its part of the dataset, by the manifest: the last batch may be there though the
        fleet has not heard of it, and batches that it heard of may not. None without a dataset.

        Returns:
            Frames that are collected again, and why an evaluation cannot go on; empty: it can.
        """
        core, slot, again, hopeless = self._core, handle.slot, 0, ""
        blocks = core.queue.blocks
        for number in tuple(handle.tickets):
            out = self._tickets.end(handle, number)
            again += core.scheduler.lost(out.round.number, slot)
            if core.episodes is not None:
                hopeless = core.episodes.give_back(out.episodes)
            assert blocks is not None
            blocks.give_back(out.block_index)
        if blocks is not None:
            blocks.forget(handle.connection.pid)
        kept = handle.landed_frames if durable_frames is None else durable_frames
        unheard = kept - handle.landed_frames
        if unheard < 0:
            core.scheduler.take_back(-unheard)
        elif unheard > 0:
            core.queue.complete(core.scheduler.found(slot, unheard))
        core.lineage.found(slot, unheard)
        core.queue.count_dropped(reason, max(0, handle.stepped_frames - kept - handle.dropped_frames))
        return max(0, again - unheard), hopeless

    def _replace(self, handle: WorkerHandle, reason: str, *, is_first: bool) -> None:
        core = self._core
        # A pod that ends while its worker starts says nothing of the manifest.
        if is_first and not core.options.waits_for_places:
            core.lifecycle.fail(WorkerFailed(f"worker {handle.name} {reason}"))
            return
        try:
            core.replacements.plan(handle, reason, now=time.monotonic())
        except WorkerFailed as error:
            core.lifecycle.fail(error)
