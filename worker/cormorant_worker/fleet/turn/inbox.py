"""What workers say, and whose business each message is.

What the first worker tells decides how memory and dataset are laid out; all others must agree.
"""

from contextlib import suppress
from functools import partial

import structlog

from cormorant_worker.envs.restarts import ENV_RESTARTED
from cormorant_worker.errors import WorkerFailed
from cormorant_worker.fleet.batch_queue import RoundShare
from cormorant_worker.fleet.core import FleetCore
from cormorant_worker.fleet.slot import LIVING, SlotState, WorkerHandle
from cormorant_worker.fleet.transport import BlockPool, Source
from cormorant_worker.fleet.turn.life import SlotLife
from cormorant_worker.fleet.turn.tickets import Tickets
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker.messages import (
    Applied,
    Failed,
    Finished,
    Leaving,
    Listening,
    Logged,
    Ready,
    Reply,
    Sealed,
    Served,
    ServerReady,
)

log = structlog.get_logger()


class Inbox:
    """Guarded by the fleet's condition."""

    def __init__(self, core: FleetCore, tickets: Tickets, life: SlotLife) -> None:
        self._core, self._tickets, self._life = core, tickets, life
        self._early: list[tuple[WorkerHandle, Ready]] = []
        """Workers that were ready before memory and dataset were laid out."""

    def receive(self, handle: WorkerHandle, source: Source | None) -> None:
        """Read what has come from a worker, and have it seen off if it has ended."""
        if handle.is_gone:
            return
        for message in handle.connection.receive(source):
            self._handle(handle, message)
            if handle.is_gone:
                return
        if not handle.connection.is_open:
            self._life.lose(handle)

    def _handle(self, handle: WorkerHandle, message: object) -> None:
        core, slot = self._core, handle.slot
        match message:
            case Sealed():
                self._seal(handle, message)
            case Ready():
                self._meet(handle, message)
            case Listening():
                core.servers.listens(slot, message.address)
            case ServerReady():
                self._life.welcome(handle, message)
            case Served():
                core.servers.note(handle, message)
            case Reply():
                self._note_reply(handle, message)
            case Applied():
                version = PolicyVersion(message.version)
                core.counters.applied(handle, version)
                core.offers.note_applied(handle, version)
            case Logged():
                if message.event == ENV_RESTARTED:
                    core.env_failures.note(slot.key, handle.name, message.fields)
                with suppress(OSError, ValueError):  # a script's standard output is closed
                    getattr(log, message.level, log.info)(message.event, **{**message.fields, "worker": handle.name})
            case Leaving():
                log.info("worker_leaving", worker=handle.name)
                self._life.let_go(handle)
            case Finished():
                slot.final_state = message.state
            case Failed():
                self._life.fail(handle, message)

    def _seal(self, handle: WorkerHandle, sealed: Sealed) -> None:
        core, slot = self._core, handle.slot
        out = self._tickets.end(handle, sealed.number)
        core.lineage.landed(slot, sealed)
        core.counters.sealed(handle, sealed)
        handle.landed_frames += sealed.landed_frames
        handle.durable_frames, handle.env_restarts = sealed.durable_frames, sealed.env_restarts
        core.events.note(
            "sealed", worker=handle.name, frames=sealed.num_frames, version=sealed.min_version, sealed=sealed
        )
        share = RoundShare(sealed, out.ticket.block_index, handle.connection.place.attempt, out.handed_at)
        for key in core.queue.land(out.round, slot.key, share):
            late = core.slots[key]
            if late.worker is not None and late.state in LIVING:
                self._tickets.seal_early(late.worker, out.round)

    def _note_reply(self, handle: WorkerHandle, reply: Reply) -> None:
        question = handle.note_reply(reply)
        if question is handle.offer:
            has_all = self._core.offers.note_reply(handle, reply)
        elif question is handle.sync:
            # What was published while it opened its dataset comes first.
            has_all = not self._core.offers.offer_next(handle)
        else:
            return
        if has_all and handle.slot.state is SlotState.READY:
            self._life.put_to_work(handle, reply)

    # -- the first worker --------------------------------------------------------------------------------------

    def _meet(self, handle: WorkerHandle, ready: Ready) -> None:
        """A worker stands at its first observation."""
        core = self._core
        if core.ready is not None:
            self._compare(handle, ready, core.ready)
            return
        self._early.append((handle, ready))
        if len(self._early) > 1:
            return
        if core.options.whole_rows:
            core.scheduler.round_up(ready.layout.num_envs, num_workers=core.num_slots)
        limit, fewest = core.blocks_needed
        core.background.submit(lambda: self._lay_out(ready, limit, fewest), partial(self._laid_out, ready))

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
        core.ready = ready
        for handle in core.slots.workers:
            self._life.tell_spaces(handle)
        if core.statistics is not None and ready.statistics is not None:
            core.statistics.begin(ready.statistics)
        core.queue.use(blocks)
        core.size_blocks()
        queue, scheduler = core.job.spec.output.queue, core.scheduler
        waits_for_learner = queue is not None and queue.on_full == "wait"
        if scheduler.mode == "sync" and scheduler.max_staleness is None and waits_for_learner and ready.specs:
            # A learner that takes a round, publishes, and takes the next one is on-policy.
            scheduler.max_staleness = 0
            core.queue.is_on_demand = True
        core.scheduler.count_from(core.found_frames)
        for handle, theirs in self._early:
            if not handle.is_gone:
                self._compare(handle, theirs, ready)
        self._early.clear()

    def _compare(self, handle: WorkerHandle, ready: Ready, first: Ready) -> None:
        if ready.layout == first.layout:
            self._life.welcome(handle, ready)
            return
        self._core.lifecycle.fail(
            WorkerFailed(
                f"worker {handle.name} makes batches of another layout than the first one: {ready.layout} instead of "
                f"{first.layout}; environments and policies must not differ between workers"
            )
        )
