"""Hands tickets out to workers, each with a block of memory, and takes them back."""

from cormorant_worker.fleet.core import FleetCore
from cormorant_worker.fleet.scheduler import Grant, Round
from cormorant_worker.fleet.slot import SlotState, TicketOut, WorkerHandle
from cormorant_worker.worker.messages import Seal, Ticket

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
        return self.num_out == 0 and not self._core.slots.count(SlotState.GONE)

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
        slot = core.slots[grant.slot]
        assert core.queue.blocks is not None
        assert slot.worker is not None, grant
        block_index, memory = core.queue.blocks.lend(slot.worker.connection.pid)
        episodes = core.episodes.take(grant.num_frames) if core.episodes is not None else ()
        ticket = Ticket(
            number=slot.worker.next_number(),
            block_index=block_index,
            block_is_new=memory is not None,
            num_frames=grant.num_frames,
            version=core.offers.published.version_of(slot),
            episodes=episodes,
        )
        self.num_out += 1
        slot.worker.send_ticket(ticket, grant.round, memory)

    def end(self, handle: WorkerHandle, number: int) -> TicketOut:
        """A worker does not hold a ticket any more."""
        self.num_out -= 1
        out = handle.tickets.pop(number)
        if handle.slot.state is SlotState.WORKING:
            self._core.scheduler.may_collect(handle.slot.key, holds=len(handle.tickets))
        return out

    def seal_early(self, handle: WorkerHandle, preempted: Round) -> None:
        """Have a worker hand over what it has of a round."""
        for number, out in handle.tickets.items():
            if out.round is preempted:
                handle.tell(Seal(ticket=number))

    def validate(self) -> None:
        """Check what always holds between two turns: for tests."""
        core = self._core
        core.slots.validate()
        held = {slot.key: len(slot.worker.tickets) for slot in core.slots.known if slot.worker is not None}
        assert sum(held.values()) == self.num_out, (held, self.num_out)
        working = {slot.key for slot in core.slots.in_state(SlotState.WORKING) if not slot.is_server}
        assert core.scheduler.held == {key: held[key] for key in working}, (core.scheduler.held, held, working)
