"""Hands tickets out to workers, each with a block of memory, and takes them back."""

from cormorant_worker.fleet.bookkeeping.core import FleetCore
from cormorant_worker.fleet.bookkeeping.scheduler import Grant, Round
from cormorant_worker.fleet.bookkeeping.worker_handle import TicketOut, WorkerHandle
from cormorant_worker.worker.messages import Request, Ticket

_MOST_GRANTS = 24
"""In one turn; the others in the next, which follows at once: callers get the condition in between."""


class Tickets:
    """Guarded by the fleet's condition."""

    def __init__(self, core: FleetCore) -> None:
        self.num_out = 0
        self._core = core

    @property
    def is_idle(self) -> bool:
        """True when no worker holds a ticket, and all that held one are accounted for."""
        return self.num_out == 0 and not self._core.pool.has_gone

    def hand_out(self) -> bool:
        """Hand out what the scheduler allows. Returns whether there may be more."""
        core = self._core
        grants = core.scheduler.grants(
            num_workers=core.num_slots,
            ahead_of_consumer=core.queue.ahead_of_consumer,
            room=core.queue.room,
            most=_MOST_GRANTS,
        )
        for grant in grants:
            self._hand_out(grant)
        return len(grants) >= _MOST_GRANTS

    def _hand_out(self, grant: Grant) -> None:
        core = self._core
        core.queue.free_a_block()
        assert core.queue.blocks is not None
        handle = core.pool.workers[grant.slot]
        block_index, memory = core.queue.blocks.lend(handle.connection.pid)
        episodes = core.episodes.take(grant.num_frames) if core.episodes is not None else ()
        ticket = Ticket(
            number=core.requests.next_number(),
            block_index=block_index,
            block_is_new=memory is not None,
            num_frames=grant.num_frames,
            version=core.offers.published.version_of(grant.slot),
            episodes=episodes,
        )
        self.num_out += 1
        handle.send_ticket(ticket, TicketOut(grant.round, block_index, grant.num_frames, episodes=episodes), memory)

    def end(self, handle: WorkerHandle, number: int) -> TicketOut:
        """A worker does not hold a ticket any more."""
        self.num_out -= 1
        out = handle.tickets.pop(number)
        if handle.is_synced and not handle.is_leaving and not handle.is_gone:
            self._core.scheduler.may_collect(handle.slot, holds=len(handle.tickets))
        return out

    def seal_early(self, handle: WorkerHandle, found: Round) -> None:
        """Have a worker hand over what it has of a round."""
        for number, out in handle.tickets.items():
            if out.round is found:
                handle.request(Request(number=self._core.requests.next_number(), action="seal", ticket=number))
