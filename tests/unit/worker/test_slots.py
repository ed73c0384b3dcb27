"""Slots go through their states along one table, and which of them are wanted follows the manifest's groups."""

import pytest

from cormorant_testing.checked_loop import check_slots
from cormorant_testing.collecting import make_job
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import FleetError, LastWorker
from cormorant_worker.fleet.slot import SlotState, WorkerHandle
from cormorant_worker.fleet.slots import Slots

S = SlotState


def make_slots(wanted: int = 1) -> Slots:
    slots = Slots(make_job(), {})
    slots.resize(wanted)
    return slots


def test_a_worker_that_leaves_keeps_what_it_reached() -> None:
    slots = make_slots()
    (slot,) = slots.wanted
    slots.move(slot, S.STARTING)
    slots.fill(slot, worker := WorkerHandle(slot, FakeConnection(), set(), last_progress=0.0))  # type: ignore[arg-type]
    facts = [(worker.is_ready, worker.has_worked, worker.gets_weights)]
    for state in (S.READY, S.WORKING, S.LEAVING, S.FINISHING):
        slots.move(slot, state)
        facts.append((worker.is_ready, worker.has_worked, worker.gets_weights))
        check_slots(slots)
    assert facts == [(False,) * 3, (True, False, True), (True,) * 3, (True, True, False), (True, True, False)]
    slots.move(slot, SlotState.GONE)
    assert (worker.is_gone, list(slots.workers), slots.is_empty) == (True, [], False)
    worker.send("reseed")  # a caller's thread asks it at this moment
    assert not worker.stuck, "its connection is not listened to any more"
    slots.vacate(slot)
    assert (slot.state, slot.worker, slots.is_empty) == (S.VACANT, None, True)


def test_given_up_slots_are_retired_once_nothing_is_left_of_their_workers() -> None:
    slots = make_slots(3)
    first, second, third = slots.wanted
    slots.move(second, S.STARTING)
    with pytest.raises(FleetError, match="cpu-1 cannot become WORKING while it is STARTING"):
        slots.move(second, S.WORKING)
    assert slots.resize({"cpu": [0]}) == [second, third]
    assert [slot.state for slot in (first, second, third)] == [S.VACANT, S.STARTING, S.RETIRED]
    slots.vacate(second)
    check_slots(slots)
    assert second.state is S.RETIRED
    assert slots.resize(2) == []
    assert [slot.state for slot in (first, second, third)] == [S.VACANT, S.VACANT, S.RETIRED]
    with pytest.raises(LastWorker, match="0 workers"):
        slots.resize(0)


class FakeConnection:
    place = WorkerPlace()

    def send(self, message: object) -> None: ...

    def flush(self) -> tuple[str, ...]:
        return ("its socket is full",)
