"""What always holds between two turns of a fleet."""

from cormorant_worker.fleet import fleet
from cormorant_worker.fleet.slot import LIVING, SERVING, SlotState
from cormorant_worker.fleet.slots import Slots
from cormorant_worker.fleet.turn.loop import FleetLoop


class CheckedLoop(FleetLoop):
    def _turn(self) -> bool:
        has_more = super()._turn()
        slots, scheduler = self._core.slots, self._core.scheduler
        check_slots(slots)
        held = {slot.key: len(slot.worker.tickets) for slot in slots._known.values() if slot.worker is not None}
        assert sum(held.values()) == self._life.num_tickets, (held, self._life.num_tickets)
        working = {slot.key for slot in slots.in_state(SlotState.WORKING) if not slot.is_server}
        assert scheduler.held == {key: held[key] for key in working}, (scheduler.held, held, working)
        return has_more


def check_slots(slots: Slots) -> None:
    wanted = set(slots.wanted)
    for slot in slots._known.values():
        state, worker = slot.state, slot.worker
        where = [known.name for known in SlotState if slot in slots._in[known]]
        assert where == [state.name], (slot.name, state, where)
        assert (worker is not None) == (state in LIVING or state is SlotState.GONE), (slot.name, state)
        assert slot.is_wanted == (slot in wanted), (slot.name, state)
        if state in (SlotState.VACANT, SlotState.RETIRED):
            assert slot.is_wanted == (state is SlotState.VACANT), (slot.name, state)
        if worker is not None and worker.tickets:
            assert state in (SlotState.WORKING, SlotState.LEAVING, SlotState.GONE), (slot.name, state)
        if worker is not None and state in SERVING:
            assert (worker.is_ready, slot.is_wanted) == (True, True), (slot.name, state)


def check_every_turn() -> None:
    """Check all fleets that this process opens from now on."""
    fleet.FleetLoop = CheckedLoop
