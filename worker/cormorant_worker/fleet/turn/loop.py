"""The fleet's thread: a loop of turns, each of which briefly holds the fleet's condition.

The cost of a turn depends on the events since the last one, not on the number of workers. A turn never waits. Between
two turns the thread waits for `Connections`.
"""

import threading
import time
from contextlib import suppress
from functools import partial

import structlog

from cormorant_worker.envs.restarts import ENV_RESTARTED
from cormorant_worker.errors import FleetError, WorkerFailed
from cormorant_worker.fleet.core import FleetCore
from cormorant_worker.fleet.slot import LIVING, SlotState, WorkerHandle
from cormorant_worker.fleet.transport import BlockPool
from cormorant_worker.fleet.turn.life import SlotLife
from cormorant_worker.fleet.turn.quiesce import Quiesce
from cormorant_worker.inference.address import Served
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker import messages

log = structlog.get_logger()

_POLL_S = 0.2
_TURN_S = 0.001
"""Longest time in which one turn handles messages; then callers may have the condition."""
_MOST_OFFERS = 48
"""Offers of weights in one turn."""
_BREATH_S = 0.0002
_ENDING_S = 10.0
_CLOCK_EVERY = 16
"""Messages between two looks at the clock."""


class FleetLoop:
    def __init__(self, core: FleetCore, life: SlotLife, quiesce: Quiesce) -> None:
        self.is_done = False
        """All frames that will be are accepted, and durable with a dataset."""
        self._core, self._changed = core, core.changed
        self._life, self._quiesce = life, quiesce
        self._early: list[tuple[WorkerHandle, messages.Ready]] = []
        """Workers that were ready before memory and dataset were laid out: what the first one tells decides how, and
        all others must agree."""
        self._is_stopped = False
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    @property
    def silent_s(self) -> float:
        """Seconds since the last turn. Never waits."""
        return 0.0 if self._is_stopped else time.monotonic() - self._turned_at

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the loop. Call with the condition held."""
        self._is_stopped = True
        self._core.waker.wake()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout=_ENDING_S)

    def _run(self) -> None:
        core = self._core
        try:
            has_more = True
            while True:
                core.connections.wait(0.0 if has_more else _POLL_S)
                with self._changed:
                    if self._is_stopped:
                        return
                    has_more = self._turn()
                core.events.tell()  # without the condition: a listener must not hold callers up
                if has_more:
                    time.sleep(_BREATH_S)  # callers that wait for the condition get it
        except Exception as error:
            with self._changed:
                core.fail(FleetError(f"the fleet's thread failed: {type(error).__name__}: {error}"))
                self._changed.notify_all()
            with suppress(OSError, ValueError):  # what failed may be a log line, into a closed pipe or file
                log.exception("fleet_thread_failed")
        finally:
            core.events.tell()

    def _turn(self) -> bool:
        """Deal with what has come, and with everything that may be due. Returns whether there is more."""
        core = self._core
        now = self._turned_at = time.monotonic()
        core.waker.clear()
        has_more = self._receive(until=now + _TURN_S)
        core.background.settle()
        self._life.start_missing(now)
        self._life.end_hung(now)
        core.queue.accept()
        core.tick()
        has_more |= core.offers.send_due(_MOST_OFFERS)
        if not (core.is_paused or core.is_closing or core.error) and not self._quiesce.holders:
            has_more |= self._life.hand_out_tickets()
        has_more |= self._life.finish_idle()
        if core.scheduler.is_done and not core.queue.backlog:
            self.is_done = core.dataset is None or core.slots.is_empty
        core.connections.flush()
        self._changed.notify_all()
        return has_more

    # -- what workers say --------------------------------------------------------------------------------------

    def _receive(self, *, until: float) -> bool:
        """Handle what workers have said, and their ends. Returns whether some of it is left for the next turn."""
        ready, heard = self._core.connections.ready, 0
        while ready:
            handle, source = ready.popleft()
            for message in () if handle.is_gone else handle.connection.receive(source):
                self._handle(handle, message)
                if handle.is_gone:
                    break
            if not (handle.is_gone or handle.connection.is_open):
                self._life.lose(handle)
            heard += 1
            if not heard % _CLOCK_EVERY and time.monotonic() > until:
                break
        return bool(ready)

    def _handle(self, handle: WorkerHandle, message: object) -> None:
        core, slot = self._core, handle.slot
        match message:
            case messages.Sealed():
                self._seal(handle, message)
            case messages.Ready():
                self._meet(handle, message)
            case messages.Listening():
                core.slots.set_address(slot, message.address)
            case messages.ServerReady():
                self._life.welcome(handle, message)
            case Served():
                books = core.counters.served.setdefault(slot.group, dict.fromkeys(message.__slots__, 0.0))
                for name in books:
                    books[name] += getattr(message, name)
            case messages.Reply():
                is_offer = handle.note_reply(message) is handle.offer
                # What was published meanwhile comes first.
                if is_offer and core.offers.note_reply(handle, message) and slot.state is SlotState.READY:
                    self._life.put_to_work(handle, message)
            case messages.Applied():
                version = PolicyVersion(message.version)
                core.counters.applied(handle, version)
                handle.version = version
                core.events.note("applied", worker=handle.name, version=version)
            case messages.Logged():
                if message.event == ENV_RESTARTED:
                    core.env_failures.note(slot.key, handle.name, message.fields)
                with suppress(OSError, ValueError):  # a script's standard output is closed
                    getattr(log, message.level, log.info)(message.event, **{**message.fields, "worker": handle.name})
            case messages.Leaving():
                log.info("worker_leaving", worker=handle.name)
                handle.pod_ends = True
                self._life.let_go(handle)
            case messages.Finished():
                slot.final_state = message.state
            case messages.Failed():
                self._life.fail(handle, message)

    def _seal(self, handle: WorkerHandle, sealed: messages.Sealed) -> None:
        core, slot = self._core, handle.slot
        out = self._life.end_ticket(handle, sealed.number)
        core.lineage.landed(slot, sealed)
        core.counters.sealed(handle, sealed)
        handle.landed_frames += sealed.landed_frames
        handle.durable_frames, handle.env_restarts = sealed.durable_frames, sealed.env_restarts
        core.events.note(
            "sealed", worker=handle.name, frames=sealed.num_frames, version=sealed.min_version, sealed=sealed
        )
        told = core.queue.land(
            out.round,
            slot.key,
            sealed,
            block_index=out.ticket.block_index,
            attempt=handle.connection.place.attempt,
            handed_at=out.handed_at,
        )
        for key in told:
            late = core.slots[key]
            if late.worker is None or late.state not in LIVING:
                continue
            for number, theirs in late.worker.tickets.items():
                if theirs.round is out.round:
                    late.worker.ask(messages.Seal(ticket=number))

    # -- the first worker --------------------------------------------------------------------------------------

    def _meet(self, handle: WorkerHandle, ready: messages.Ready) -> None:
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

        def lay_out() -> BlockPool:
            # Without the condition: an object store is asked what it has, a dataset may be far away.
            blocks = core.engine.make_blocks(ready.layout, limit)
            blocks.resize(limit, at_least=fewest)
            if core.dataset is not None:
                core.dataset.open(core.job, ready)
            return blocks

        core.background.submit(lay_out, partial(self._laid_out, ready))

    def _laid_out(self, ready: messages.Ready, blocks: BlockPool | Exception) -> None:
        core = self._core
        if isinstance(blocks, Exception):
            core.fail(blocks, what="lay out memory for batches")
            return
        core.ready = ready
        for handle in core.slots.workers:
            self._life.tell_spaces(handle)
        if core.statistics is not None and ready.statistics is not None:
            core.statistics.begin(ready.statistics)
        core.queue.blocks = blocks
        core.size_blocks()
        queue, scheduler = core.job.spec.output.queue, core.scheduler
        waits_for_learner = queue is not None and queue.on_full == "wait"
        if scheduler.mode == "sync" and scheduler.max_staleness is None and waits_for_learner and ready.specs:
            # A learner that takes a round, publishes, and takes the next one is on-policy.
            scheduler.max_staleness = 0
            core.queue.is_on_demand = True
        core.scheduler.accepted_frames = core.found_frames
        for handle, theirs in self._early:
            if not handle.is_gone:
                self._compare(handle, theirs, ready)
        self._early.clear()

    def _compare(self, handle: WorkerHandle, ready: messages.Ready, first: messages.Ready) -> None:
        if ready.layout == first.layout:
            self._life.welcome(handle, ready)
            return
        self._core.fail(
            WorkerFailed(
                f"worker {handle.name} makes batches of another layout than the first one: {ready.layout} instead of "
                f"{first.layout}; environments and policies must not differ between workers"
            )
        )
