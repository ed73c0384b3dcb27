"""Who is offered which published weights."""

from typing import Any

import torch

from cormorant_contract.policy import Policy, RandomPolicy
from cormorant_testing.collecting import make_job
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.events import Events, FleetEvent
from cormorant_worker.fleet.offers import Offers
from cormorant_worker.fleet.slot import SlotState, WorkerHandle
from cormorant_worker.fleet.slots import Slots
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.wire import SharedMemory
from cormorant_worker.worker.messages import Reply, Request


def test_a_worker_that_leaves_gets_the_version_that_its_ticket_waits_for() -> None:
    slots = Slots(make_job(), {})
    slots.resize(1)
    (slot,) = slots.wanted
    slots.move(slot, SlotState.STARTING)
    connection: Any = FakeConnection()
    slots.fill(slot, worker := WorkerHandle(slot, connection, set(), last_progress=0.0))
    for state in (SlotState.READY, SlotState.WORKING):
        slots.move(slot, state)
    offers = Offers(slots, Events(), policy=Policy(random=RandomPolicy()))
    payload = SharedMemory.create(4)
    for version in (1, 2):
        offers.publish(WeightsBlob.of({"policy": {"w": torch.zeros(1)}}), version, payload)
        offers.send_due(48)
    assert connection.versions == [1]  # the second waits for the answer to the first
    ticket: Any = "of version 2"
    worker.tickets[7] = ticket
    slots.move(slot, SlotState.LEAVING)
    offers.note_reply(worker, Reply(number=1))
    assert connection.versions == [1, 2]
    offers.note_reply(worker, Reply(number=2))
    assert connection.versions == [1, 2]  # it has all
    worker.tickets.clear()
    offers.publish(WeightsBlob.of({"policy": {"w": torch.zeros(1)}}), 3, payload)
    offers.note_reply(worker, Reply(number=2))
    offers.send_due(48)
    assert connection.versions == [1, 2]  # nobody waits for the third


class FakeConnection:
    def __init__(self) -> None:
        self.place = WorkerPlace()
        self.versions: list[int] = []

    def request(self, request: Request, _: object) -> None:
        self.versions.append(getattr(request.command, "version", 0))

    def flush(self) -> tuple[()]:
        return ()


def test_listeners_hear_events_in_order_and_harm_nothing() -> None:
    events, heard = Events(), list[FleetEvent]()

    def fail(event: FleetEvent) -> None:
        raise RuntimeError("a listener of this test fails")

    events.subscribe(fail)
    end = events.subscribe(heard.append)
    for kind in ("paused", "resumed"):
        events.note(kind)
    events.tell()
    end()
    end()
    events.note("paused")
    events.tell()
    assert [event.kind for event in heard] == ["paused", "resumed"]
