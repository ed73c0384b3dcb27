from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cormorant_testing.stats import sealed
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.trajectories import EpisodeMetrics, Trajectories
from cormorant_worker.errors import StateError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.slot import Slot
from cormorant_worker.fleet.slots import Lineage
from cormorant_worker.weights.staged import PolicyVersion


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


def test_a_state_with_lower_ids_brings_none_of_them_back() -> None:
    found = Trajectories(2, 100, EpisodeMetrics((), (), 2), tasks=())
    found.skip_to(50)
    found.open(np.array([0]))
    assert found.ids.tolist() == [102, 101]


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
