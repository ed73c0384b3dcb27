"""Slots go through their states along one table; what is known of the workers in them: who is wanted, what was used up,
who is offered which weights, who hangs; and what a fleet costs.
"""

import resource
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.head.instant import InstantEngine

from cormorant_contract.policy import Policy, RandomPolicy
from cormorant_testing.checked_loop import check_slots
from cormorant_testing.collecting import make_job
from cormorant_testing.cost import lines_run
from cormorant_testing.stats import sealed
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.timing import NUM_TIMING, Timing, spent_ns
from cormorant_worker.errors import FleetError, StateError
from cormorant_worker.fleet.events import Events, FleetEvent
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.hang_detector import HangDetector
from cormorant_worker.fleet.offers import Offers
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.slot import Slot, SlotState, WorkerHandle
from cormorant_worker.fleet.slots import Lineage, Slots
from cormorant_worker.fleet.stats import FleetCounters
from cormorant_worker.fleet.turn.life import raise_file_limit
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.wire import SharedMemory
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import Reply, Request

S = SlotState
LIMITS = {Phase.STEPPING: 10, Phase.BUILDING: 300, Phase.STORING: 600, Phase.ASKING: 10}


class FakeConnection:
    """Of a worker that was stopped in a phase."""

    pid, frames = 1, 7
    spent_ns: tuple[int, ...] = ()

    def __init__(self, phase: Phase = Phase.STEPPING, *, is_server: bool = False, unsent: tuple[str, ...] = ()) -> None:
        self.phase, self.place, self.unsent = phase, WorkerPlace(is_server=is_server), unsent
        self.offered: list[int] = []

    def send(self, message: Any, _: object) -> None:
        """Nobody reads it."""

    def ask(self, request: Request, _: object) -> None:
        self.offered.append(getattr(request.command, "version", 0))

    def flush(self) -> tuple[str, ...]:
        return self.unsent


def sized(wanted: int = 1) -> Slots:
    slots = Slots(make_job(), {})
    slots.resize(wanted)
    return slots


def fill(slots: Slots, connection: Any) -> WorkerHandle:
    """Begin a worker in the first slot."""
    slot = next(slots.wanted)
    slots.move(slot, S.STARTING)
    slots.fill(slot, worker := WorkerHandle(slot, connection, set(), last_progress=0.0))
    return worker


def test_a_worker_that_leaves_keeps_what_it_reached() -> None:
    slots = sized()
    worker = fill(slots, FakeConnection(unsent=("its socket is full",)))
    slot = worker.slot
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
    assert slots.describe() == "there are no workers"


def test_given_up_slots_are_retired_once_nothing_is_left_of_their_workers() -> None:
    slots = sized(3)
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
    for wrong, words in (
        (0, "0 workers: a fleet needs at least 1"),
        ({"cpu": -1}, "sizes and indices of worker groups begin at 0; got cpu: -1"),
        ({"gpu": 2}, "there are no worker groups gpu; the manifest has cpu"),
    ):
        with pytest.raises(FleetError, match=words):
            slots.resize(wrong)


def make_slots(number: int) -> tuple[Slot, ...]:
    return tuple(Slot(("cpu", index)) for index in range(number))


def saved(lineage: Lineage, *slots: Slot, dataset: str = "") -> FleetState:
    return FleetState(
        frames=0, version=PolicyVersion(0), weights=b"", seed=0, workers={}, run=lineage.run, epoch=lineage.epoch,
        dataset=dataset, attempts={slot.name: max(0, slot.attempt) for slot in slots},
        written={slot.name: slot.written for slot in slots},
    )  # fmt: skip


def test_no_two_processes_of_a_job_share_seeds_or_ids() -> None:
    places = []
    for epoch in range(3):
        lineage, (_, one) = Lineage(epoch=epoch, warmup_frames=0), make_slots(2)
        for _ in range(1_100):  # more than `maxRestartsPerSlot` allows: these were scaled down, or evicted
            place = lineage.begin(one, WorkerPlace(group="cpu", index=1), batch_ids=100)
            lineage.landed(one, sealed(10, next_trajectory=place.first_trajectory + 40))
            places.append(place)
    assert len({place.first_trajectory for place in places}) == len(places)
    assert len({tuple(place.env_seeds(1)) for place in places}) == len(places)
    firsts = [place.first_trajectory for place in places[:1_100]]
    assert all(later >= earlier + 40 for earlier, later in pairwise(firsts))
    assert firsts[-1] - firsts[0] < (1 << 33) + 1_000_000, "no ids are left for more"
    assert [place.attempt for place in places[1_100:1_103]] == [0, 1, 2]


def test_an_attempt_begins_above_what_its_predecessors_and_the_dataset_have() -> None:
    lineage, (zero,) = Lineage(epoch=0, warmup_frames=0), make_slots(1)
    assert lineage.begin(zero, WorkerPlace(group="cpu"), first_free=7).attempt == 7
    assert lineage.begin(zero, WorkerPlace(group="cpu"), first_free=7).attempt == 8
    lineage.landed(zero, sealed(10, next_trajectory=15 << 24))
    assert lineage.begin(zero, WorkerPlace(group="cpu"), batch_ids=100).first_trajectory == (15 << 24) + 400


def test_replacements_collect_the_random_frames_that_are_missing() -> None:
    lineage, slots = Lineage(epoch=0, warmup_frames=101), make_slots(4)
    zero, one, two, three = slots
    assert [lineage.warmup_of(slot, (zero, one)) for slot in (zero, one)] == [51, 50]
    lineage.landed(zero, sealed(20, random_frames=20))
    assert lineage.warmup_of(zero, (zero, one)) == 31
    lineage.landed(zero, sealed(40, random_frames=30))
    assert lineage.warmup_of(zero, (zero, one)) == 1
    lineage.landed(zero, sealed(40, random_frames=1))
    assert lineage.warmup_of(zero, (zero, one)) == 0
    assert lineage.warmup_of(two, (zero, one, two)) == 0
    lineage.give_up(one)
    assert [lineage.warmup_of(slot, (zero, two, three)) for slot in (zero, two, three)] == [0, 0, 50]
    assert [slot.warmup_share for slot in (zero, two, three)] == [51, 0, 50]


def test_a_state_is_the_last_while_nothing_has_come_since() -> None:
    lineage, (zero, one) = Lineage(epoch=0, warmup_frames=0), make_slots(2)
    zero.written = 40
    lineage.landed(one, sealed(10))
    state = saved(lineage, zero, one)
    assert lineage.is_last(state, zero, "")
    lineage.landed(one, sealed(10))
    assert (lineage.is_last(state, zero, ""), lineage.is_last(state, one, "")) == (True, False)
    # Another fleet knows what its dataset says, and nothing without one.
    state = saved(lineage, zero, one, dataset="/data")
    known = [(20, "/data", True), (21, "/data", False), (20, "/other", False), (20, "", False)]
    for written, dataset, expected in known:
        assert Lineage(epoch=0, warmup_frames=0).is_last(state, Slot(("cpu", 1), written=written), dataset) is expected


def test_a_fleet_that_takes_up_a_state_has_an_epoch_of_its_own() -> None:
    first, (theirs, ours) = Lineage(epoch=4, warmup_frames=0), make_slots(2)
    for _ in range(3):
        first.begin(theirs, WorkerPlace(group="cpu"))
    ours.key = theirs.key
    same, older, newer = first, Lineage(epoch=2, warmup_frames=0), Lineage(epoch=9, warmup_frames=0)
    for lineage in (same, older, newer):
        lineage.join(saved(first, theirs), (ours,))
    assert [lineage.epoch for lineage in (same, older, newer)] == [4, 5, 9]
    assert older.begin(ours, WorkerPlace(group="cpu")).attempt == 3
    with pytest.raises(StateError, match="epoch 4095 is the last one"):
        older.join(replace(saved(first), epoch=4095), ())


def test_a_worker_that_leaves_gets_the_version_that_its_ticket_waits_for() -> None:
    slots, connection = sized(), FakeConnection()
    worker = fill(slots, connection)
    for state in (S.READY, S.WORKING):
        slots.move(worker.slot, state)
    offers = Offers(slots, Events(), policy=Policy(random=RandomPolicy()))
    payload = SharedMemory.create(4)
    for version in (1, 2):
        offers.publish(WeightsBlob.of({"policy": {"w": torch.zeros(1)}}), version, payload)
        offers.send_due(48)
    assert connection.offered == [1]  # the second waits for the answer to the first
    ticket: Any = "of version 2"
    worker.tickets[7] = ticket
    slots.move(worker.slot, S.LEAVING)
    offers.note_reply(worker, Reply(number=1))
    assert connection.offered == [1, 2]
    offers.note_reply(worker, Reply(number=2))
    assert connection.offered == [1, 2]  # it has all
    worker.tickets.clear()
    offers.publish(WeightsBlob.of({"policy": {"w": torch.zeros(1)}}), 3, payload)
    offers.note_reply(worker, Reply(number=2))
    offers.send_due(48)
    assert connection.offered == [1, 2]  # nobody waits for the third


def test_a_worker_applies_what_it_accepted_before_it_refused_a_newer_version() -> None:
    slots = sized()
    worker = fill(slots, FakeConnection())
    for state in (S.READY, S.WORKING):
        slots.move(worker.slot, state)
    offers = Offers(slots, Events(), policy=Policy(random=RandomPolicy()))
    for version, error in ((1, ""), (2, "does not fit"), (3, "does not fit")):
        blob = WeightsBlob.of({"policy": {"w": torch.zeros(1)}})
        offers.publish(blob, version, SharedMemory.create(4))
        offers.send_due(48)
        offers.note_reply(worker, Reply(number=version, error=error))
    first, *later = (offers.receipt(PolicyVersion(version)) for version in (1, 2, 3))
    assert (first.waiting, first.refused, offers.is_decided(first.version, [])) == (("cpu-0",), {}, False)
    for receipt in later:
        assert (receipt.waiting, receipt.refused) == ((), {"cpu-0": "does not fit"})
        assert offers.is_decided(receipt.version, [])


def test_listeners_hear_events_in_order_and_harm_nothing() -> None:
    events, heard = Events(), list[FleetEvent]()

    def fail(event: FleetEvent) -> None:
        raise RuntimeError("a listener of this test fails")

    events.subscribe(fail)
    events.subscribe(heard.append)
    for kind in ("paused", "resumed"):
        events.note(kind)
    events.tell()
    assert [event.kind for event in heard] == ["paused", "resumed"]


def detector_of(connection: Any, *, hang_timeout_s: float = 10.0) -> HangDetector:
    place = connection.place
    slot = Slot((place.group, place.index), is_server=place.is_server, state=SlotState.WORKING)
    handle = slot.worker = WorkerHandle(slot, connection, set(), last_progress=0.0, reached=SlotState.WORKING)
    handle.tickets[1] = None  # type: ignore[assignment]  # that there is one is all that counts
    options = FleetOptions(hang_timeout_s=hang_timeout_s)
    detector = HangDetector(make_job(), options, FleetCounters())
    detector.add(handle)
    return detector


@pytest.mark.parametrize("phase", LIMITS)
def test_a_stopped_worker_is_found_in_every_phase(phase: Phase) -> None:
    detector = detector_of(FakeConnection(phase))
    for now in (1.0, 1e6):  # the fleet itself stood still, which is no silence of the worker
        assert not detector.turn(now, is_paused=False)
    assert not any(detector.turn(1e6 + second, is_paused=True) for second in range(1, 1200)), "it was told to pause"
    found = next(second for second in range(1, 1200) if detector.turn(2e6 + second, is_paused=False))
    assert LIMITS[phase] < found <= LIMITS[phase] + 2


def test_a_worker_that_looks_up_while_it_waits_for_a_server_is_left_alone() -> None:
    connection = FakeConnection(Phase.ASKING)
    numbers = np.zeros(NUM_TIMING, dtype=np.int64)
    timing = Timing(numbers)
    detector = detector_of(connection)
    for second in range(1, 1200):
        timing.begin()
        connection.spent_ns = spent_ns(numbers.tolist(), until_ns=0)
        assert not detector.turn(float(second), is_paused=False)


@pytest.mark.parametrize(("act_s", "limit_s"), [(1, 15), (4, 40), (20, 120)])
def test_a_frozen_server_is_found_by_its_own_history(act_s: int, limit_s: int) -> None:
    connection = FakeConnection(is_server=True)
    detector = detector_of(connection, hang_timeout_s=120.0)
    alive_s = 30 * act_s
    found = []
    for second in range(1, alive_s + 200):
        if second <= alive_s and second % act_s == 0:
            connection.frames += 1
        found += [second] if detector.turn(float(second), is_paused=False) else []
    assert limit_s < found[0] - alive_s <= limit_s + 3


# -- what a fleet costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_dataset", [False, True])
def test_one_number_costs_the_same_for_any_number_of_workers(tmp_path: Path, has_dataset: bool) -> None:
    def costs(workers: int) -> list[int]:
        uri = str(tmp_path / str(workers)) if has_dataset else ""
        job = make_job(num_envs=1, queue={"capacityBatches": 8}, dataset=uri, collection={"framesPerBatch": 1})
        with WorkerFleet(job, FleetOptions(workers=workers), engine=InstantEngine()) as fleet:
            reader = LocalFleet(fleet)
            for _ in range(20):
                assert reader.next_batch(timeout=30) is not None
            fleet.pause()
            for _ in range(4):  # each reads some heartbeats
                fleet.stats(workers=False)
            handles = tuple(fleet._core.slots.workers)
            stats = fleet.stats(workers=False)
            assert stats.undurable_frames == has_dataset * sum(handle.landed_frames for handle in handles)
            calls = (lambda: fleet.version, lambda: fleet.stats(workers=False))
            return [lines_run(call) for call in calls]

    assert costs(600) == costs(300)


def test_soft_file_limit_is_raised_and_never_lowered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    try:
        for before in (512, most):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
            raise_file_limit(1, each=9)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_fleet_that_may_not_open_more_files_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(num_envs=1, queue={"capacityBatches": 2}, collection={"framesPerBatch": 1})
    with WorkerFleet(job, FleetOptions(workers=2), engine=InstantEngine()) as fleet:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
        with pytest.raises(FleetError, match=r"800 workers need 1,056 .* have 1,000 .* start 744 workers"):
            fleet.resize(800)
        assert fleet.stats().groups["cpu"].desired == 2
        assert LocalFleet(fleet).next_batch(timeout=30) is not None
