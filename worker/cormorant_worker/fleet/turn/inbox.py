"""What workers say, and whose business each message is."""

from contextlib import suppress

import structlog

from cormorant_worker.envs.restarts import ENV_RESTARTED
from cormorant_worker.errors import WorkerFailed
from cormorant_worker.fleet.bookkeeping.batch_queue import RoundShare
from cormorant_worker.fleet.bookkeeping.core import FleetCore
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.fleet.transport import Source
from cormorant_worker.fleet.turn.bootstrap import Bootstrap
from cormorant_worker.fleet.turn.reaper import Reaper
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

    def __init__(self, core: FleetCore, bootstrap: Bootstrap, tickets: Tickets, reaper: Reaper) -> None:
        self._core, self._bootstrap, self._tickets, self._reaper = core, bootstrap, tickets, reaper

    def receive(self, handle: WorkerHandle, source: Source | None) -> None:
        """Read what has come from a worker, and have it seen off if it has ended."""
        if handle.is_gone:
            return
        for message in handle.connection.receive(source):
            self._handle(handle, message)
            if handle.is_gone:
                return
        if not handle.connection.is_open:
            self._reaper.lose(handle)

    def _handle(self, handle: WorkerHandle, message: object) -> None:
        match message:
            case Sealed():
                self._seal(handle, message)
            case Ready():
                self._bootstrap.meet(handle, message)
            case Listening():
                self._core.servers.listens(handle.slot, message.address)
            case ServerReady():
                self._bootstrap.meet_server(handle, message)
            case Served():
                self._core.servers.note(handle, message)
            case Reply():
                self._note_reply(handle, message)
            case Applied():
                before = handle.version
                self._core.offers.note_applied(handle, PolicyVersion(message.version))
                if handle.is_synced:
                    self._core.counters.applied(handle.group, before, handle.version)
            case Logged():
                if message.event == ENV_RESTARTED:
                    self._core.env_failures.note(handle.slot, handle.name, message.fields)
                with suppress(OSError, ValueError):  # a script's standard output is closed
                    getattr(log, message.level, log.info)(message.event, **{**message.fields, "worker": handle.name})
            case Leaving():
                log.info("worker_leaving", worker=handle.name)
                self._reaper.let_go(handle)
            case Finished():
                self._reaper.finished(handle, message.state)
            case Failed():
                self._reaper.fail(handle, message)

    def _seal(self, handle: WorkerHandle, sealed: Sealed) -> None:
        core, slot = self._core, handle.slot
        out = self._tickets.end(handle, sealed.number)
        core.lineage.landed(slot, sealed)
        core.counters.sealed(handle, sealed)
        handle.landed(sealed)
        core.events.note(
            "sealed", worker=handle.name, frames=sealed.num_frames, version=sealed.min_version, sealed=sealed
        )
        for late in core.queue.land(
            out.round, slot, RoundShare(sealed, out.block_index, handle.attempt, out.handed_at)
        ):
            if (other := core.pool.workers.get(late)) is not None:
                self._tickets.seal_early(other, out.round)

    def _note_reply(self, handle: WorkerHandle, reply: Reply) -> None:
        offers, requests = self._core.offers, self._core.requests
        requests.note_reply(handle, reply)
        if reply.number == handle.offer:
            has_all = offers.note_reply(handle, reply)
            if has_all and not handle.is_synced:
                self._sync(handle, reply)
        elif reply.number == handle.sync_request:
            requests.take(reply.number)
            # What was published while it opened its dataset comes first.
            if not offers.offer_next(handle):
                self._sync(handle, reply)

    def _sync(self, handle: WorkerHandle, reply: Reply) -> None:
        """A worker has the current weights: it may collect."""
        core = self._core
        core.pool.synced(handle)
        core.counters.synced(handle)
        if not (handle.is_leaving or handle.is_server):
            core.scheduler.may_collect(handle.slot, holds=len(handle.tickets))
        core.events.note("worker_ready", worker=handle.name, version=handle.version, reason=handle.policy_call)
        if reply.error:
            core.lifecycle.fail(WorkerFailed(f"worker {handle.name} refused the current weights: {reply.error}"))
