"""The fleet's books, without processes: who may collect how many frames, and which blocks are lent."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cormorant_testing.cost import lines_run
from cormorant_testing.stats import sealed
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.batch_queue import BatchQueue, Loan
from cormorant_worker.fleet.local.engine import SharedBlockPool
from cormorant_worker.fleet.ray.engine import RayBlockPool
from cormorant_worker.fleet.scheduler import Grant, Round, Scheduler
from cormorant_worker.spaces import Leaf

LAYOUT = Layout(
    num_rows=1,
    num_envs=1,
    observation=(Leaf(key=("observation",), shape=(), dtype=np.dtype(np.float32)),),
    action=(Leaf(key=("action",), shape=(), dtype=np.dtype(np.int64)),),
)


def make_schedule(mode: str = "sync", *, total: int | None = None, bound: int | None = None, **more: Any) -> Scheduler:
    return Scheduler(mode=mode, total_frames=total, max_staleness=bound, **({"frames_per_batch": 10} | more))


def hand_out(schedule: Scheduler, held: dict[tuple[str, int], int], **limits: int) -> list[Grant]:
    """What `grants` gives when these workers, of one group, may collect and hold so many tickets."""
    for slot in tuple(schedule.held):
        schedule.may_not_collect(slot)
    for slot, tickets in held.items():
        schedule.may_collect(slot, holds=tickets)
    return schedule.grants(**{"num_workers": len(held), "ahead_of_consumer": 0, "room": 9} | limits)


def begun(schedule: Scheduler, workers: int) -> tuple[list[tuple[str, int]], list[Grant]]:
    """So many workers that hold a ticket each, and get their second one."""
    places = [("cpu", i) for i in range(workers)]
    return places, hand_out(schedule, dict.fromkeys(places, 1), room=workers)


def queue_of(
    schedule: Scheduler, *, blocks: int = 3, capacity: int = 1, drops: bool = False, **more: bool
) -> BatchQueue:
    deliveries = BatchQueue(schedule, capacity=capacity, drops_oldest=drops, **more)
    deliveries.blocks = SharedBlockPool(LAYOUT, blocks)
    return deliveries


def land(deliveries: BatchQueue, grant: Grant, *, version: int = 0) -> None:
    """A worker does what it was granted, and the queue accepts it if it can."""
    block_index = deliveries.blocks.lend()
    found, slot = grant
    deliveries.land(found, slot, sealed(found.frames[slot], version=version), block_index=block_index)
    deliveries.accept()


class Books(RuleBasedStateMachine):
    """Workers that collect, die and are replaced; a consumer that takes, publishes and dawdles."""

    @initialize(
        mode=st.sampled_from(["sync", "async"]),
        frames_per_batch=st.integers(1, 7),
        total=st.integers(1, 60),
        bound=st.sampled_from([None, 0, 1, 2]),
        workers=st.integers(1, 3),
        capacity=st.integers(1, 3),
        drops=st.booleans(),
        threshold=st.sampled_from([1.0, 0.6, 0.1]),
    )
    def begin(self, *, mode: str, total: int, bound: int | None, workers: int, capacity: int, **more: Any) -> None:
        self.total, self.bound, self.capacity, self.drops = total, bound, capacity, more["drops"]
        sizes = {"frames_per_batch": more["frames_per_batch"], "total": total}
        threshold = more["threshold"] if mode == "sync" else 1.0
        self.schedule = make_schedule(mode, bound=bound, preemptive_threshold=threshold, **sizes)
        self.told: set[tuple[int, tuple[str, int]]] = set()
        """Rounds and those of their members that are to hand over what they have."""
        self.deliveries = queue_of(self.schedule, blocks=0, capacity=capacity, drops=self.drops)
        self.places: list[tuple[str, int]] = []
        self.alive: set[tuple[str, int]] = set()
        self.leaving: set[tuple[str, int]] = set()
        self.tickets: dict[tuple[str, int], list[tuple[Round, int, int]]] = {}
        self.version, self.taken = 0, -1
        self.delivered = self.landed_frames = self.recollected = 0
        self.held: list[Loan] = []
        """What consumers have borrowed, each with its memory or copied."""
        self.resize(workers)

    @rule(workers=st.integers(1, 3))
    def resize(self, workers: int) -> None:
        wanted = [("cpu", i) for i in range(workers)]
        for place in set(self.places) - set(wanted):
            if place in self.alive:
                self.leaving.add(place)
            self.deliveries.complete(self.schedule.forget_member(place))
        self.places = wanted
        per_round = workers if self.schedule.mode == "sync" else 1
        self.deliveries.blocks.limit = 2 * workers + self.capacity * per_round
        self.turn()

    @rule()
    def turn(self) -> None:
        for place in self.places:
            if place not in self.alive:
                self.alive.add(place)
                self.tickets[place] = []
        for place in [p for p in self.leaving if not self.tickets.get(p)]:
            self.leaving.discard(place)
            self.alive.discard(place)
            self.deliveries.complete(self.schedule.forget_member(place))
        self.deliveries.accept()
        held = {p: len(self.tickets[p]) for p in self.alive if p not in self.leaving}
        for found, place in hand_out(
            self.schedule,
            held,
            num_workers=len(self.places),
            ahead_of_consumer=self.deliveries.ahead_of_consumer,
            room=self.deliveries.room,
        ):
            self.deliveries.free_a_block()
            block_index = self.deliveries.blocks.lend()
            assert all(held.number < found.number for held, _, _ in self.tickets[place]), "frames in order"
            self.tickets[place].append((found, block_index, self.version))

    @precondition(lambda self: any(self.tickets.get(p) for p in self.alive))
    @rule(data=st.data(), old=st.booleans())
    def land(self, data: st.DataObject, old: bool) -> None:
        place = data.draw(st.sampled_from(sorted(p for p in self.alive if self.tickets[p])))
        found, block_index, version = self.tickets[place].pop(0)
        frames = found.frames[place]
        if (found.number, place) in self.told:
            frames = data.draw(st.integers(1, frames))
        self.landed_frames += frames
        message = sealed(frames, version=max(0, version - old))
        for other in self.deliveries.land(found, place, message, block_index=block_index):
            assert any(held is found for held, _, _ in self.tickets[other])
            self.told.add((found.number, other))
        self.turn()

    @precondition(lambda self: bool(self.alive))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(place)
        for found, block_index, _ in self.tickets.pop(place):
            self.deliveries.blocks.give_back(block_index)
            assert self.schedule.lost(found, place) == found.frames[place]
        self.leaving.discard(place)
        self.deliveries.complete(self.schedule.forget_member(place, only_preempted=place in self.places))

    @rule()
    def borrow(self) -> None:
        least = None if self.bound is None else self.version - self.bound
        taken = self.deliveries.take(min_version=least)
        if taken is None:
            return
        self.held.append(taken)
        assert self.schedule.mode == "async" or taken.number > self.taken, "rounds in order"
        self.taken = taken.number
        assert least is None or taken.min_version >= least
        assert [part.worker for part in taken.parts] == sorted(part.worker for part in taken.parts)
        self.delivered += taken.num_frames

    @precondition(lambda self: self.held)
    @rule(data=st.data(), copied=st.booleans(), publishes=st.integers(0, 2))
    def give_back(self, data: st.DataObject, copied: bool, publishes: int) -> None:
        loan = data.draw(st.sampled_from(self.held))
        if copied:
            loan.copied()
        else:
            self.version += publishes
            self.held.remove(loan)
            for _ in range(2):
                loan.release()
        self.turn()

    @rule(publishes=st.integers(0, 2))
    def take(self, publishes: int) -> None:
        """What a single consumer does: the last one back, the next one."""
        for loan in self.held:
            loan.release()
        self.held.clear()
        self.turn()
        self.borrow()
        self.version += publishes

    @rule()
    def discard(self) -> None:
        """What a restore does, when no ticket is out."""
        if any(self.tickets.values()):
            return
        before = self.schedule.landed_frames
        self.deliveries.discard("restore")
        self.schedule.accepted_frames = before
        assert not self.schedule._open

    @invariant()
    def never_more_than_the_total_is_asked_for(self) -> None:
        assert self.schedule.accepted_frames + self.schedule.outstanding_frames <= self.total
        assert self.schedule.remaining_frames >= 0
        assert self.schedule.outstanding_frames == sum(
            sum(found.frames.values()) for found in self.schedule._open.values()
        )

    def incomplete(self) -> list[Any]:
        """What has landed of rounds that wait for others."""
        return [
            part for found in self.schedule._open.values() if not found.is_complete for part in found.landed.values()
        ]

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        blocks, deliveries = self.deliveries.blocks, self.deliveries
        out = [block_index for tickets in self.tickets.values() for _, block_index, _ in tickets]
        kept = [part.block_index for part, _ in self.incomplete()]
        queued = [p.block_index for d in (*deliveries._queue, *(d for _, d in deliveries.backlog)) for p in d.parts]
        held = [part.block_index for loan in deliveries._lent for part in loan.parts]
        assert deliveries._lent <= deliveries._at_work == set(self.held)
        unsettled = sum(delivery.num_frames for delivery in (*deliveries._queue, *self.held))
        assert deliveries.unsettled_frames == unsettled <= self.schedule.accepted_frames
        assert self.drops or len(deliveries._lent) + len(deliveries._queue) <= self.capacity
        everywhere = [*out, *kept, *queued, *held, *blocks._free]
        assert sorted(everywhere) == list(range(len(blocks._blocks)))

    @invariant()
    def what_was_collected_is_delivered_dropped_or_waits(self) -> None:
        incomplete = sum(told.num_frames for _, told in self.incomplete())
        complete = (*self.deliveries._queue, *(loan for _, loan in self.deliveries.backlog))
        waiting = incomplete + sum(loan.num_frames for loan in complete)
        assert self.landed_frames == self.delivered + sum(self.deliveries.dropped.values()) + waiting

    def teardown(self) -> None:
        """However it began, it ends: everybody works on, and the total is reached exactly."""
        for _ in range(2000):
            if self.schedule.is_done and not self.deliveries.num_waiting:
                break
            self.turn()
            for place in sorted(self.alive):
                if self.tickets.get(place):
                    found, block_index, version = self.tickets[place].pop(0)
                    self.landed_frames += found.frames[place]
                    message = sealed(found.frames[place], version=version)
                    self.deliveries.land(found, place, message, block_index=block_index)
            self.take(1)
        else:
            raise AssertionError("it does not end")
        assert self.schedule.accepted_frames == self.total
        for loan in self.held:
            loan.release()
        assert not any(self.tickets.values())
        assert len(self.deliveries.blocks._free) == len(self.deliveries.blocks._blocks)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBooks = Books.TestCase


@pytest.mark.parametrize(
    ("threshold", "workers", "enough"),
    # 0.28 * 25 is a little more than 7 in floating point.
    [(0.01, 4, 1), (2 / 3, 3, 2), (0.7, 4, 3), (0.75, 4, 3), (0.28, 25, 7)],
)
def test_stragglers_are_told_once_enough_have_landed(threshold: float, workers: int, enough: int) -> None:
    schedule = make_schedule(total=600, preemptive_threshold=threshold)
    places, grants = begun(schedule, workers)
    found = grants[0][0]
    for i, (_, slot) in enumerate(grants[:enough]):
        schedule.landed(found, slot, 10)
        assert schedule.preempt(found) == (places[enough:] if i == enough - 1 else [])
    assert schedule.preempt(found) == []  # once
    for place in places[enough:]:
        schedule.landed(found, place, 3)
    assert found.is_complete
    schedule.accepted(found.number)
    assert schedule.remaining_frames == 600 - enough * 10 - (workers - enough) * 3


def test_a_preempted_round_waits_for_nobody_who_is_lost() -> None:
    schedule = make_schedule(total=90, preemptive_threshold=0.5)
    places, ((found, _), *_) = begun(schedule, 4)
    schedule.lost(found, places[0])
    assert schedule.forget_member(places[0], only_preempted=True) == []
    assert found.pending == {places[0]}, "its next worker gets the ticket"
    schedule.landed(found, places[1], 10)
    assert schedule.preempt(found) == []
    schedule.landed(found, places[2], 10)
    assert schedule.preempt(found) == [places[3]]  # and the one that was lost before is out of it
    schedule.lost(found, places[3])
    assert schedule.forget_member(places[3], only_preempted=True) == [found]
    assert found.frames == {places[1]: 10, places[2]: 10}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_drain_keeps_what_landed_and_waits_for_no_lost_worker(mode: str) -> None:
    schedule = make_schedule(mode)
    places, grants = begun(schedule, 3)
    first, second, third = (found for found, _ in grants)
    schedule.landed(first, places[0], 10)
    schedule.lost(second, places[1])
    assert schedule.drain() == []  # the third is still at work
    assert not schedule.is_done
    assert hand_out(schedule, {places[1]: 0}, num_workers=3) == []
    schedule.lost(third, places[2])
    assert schedule.forget_member(places[2]) == ([first] if mode == "sync" else [])
    schedule.accepted(first.number)
    assert schedule.accepted_frames == 10
    assert schedule.is_done


def test_sync_shares_the_last_round_out_evenly() -> None:
    schedule = make_schedule(total=37)
    held = {("cpu", i): 0 for i in range(3)}
    assert hand_out(schedule, {("cpu", 0): 0}, num_workers=3) == [], "it waits for all"
    sizes = [[found.frames[slot] for found, slot in hand_out(schedule, held, room=3)] for _ in range(2)]
    assert sizes == [[10, 10, 10], [3, 2, 2]]
    assert schedule.remaining_frames == 0


def test_a_short_last_round_does_not_overtake_the_one_before() -> None:
    schedule = make_schedule(total=21)
    deliveries = queue_of(schedule, capacity=4, blocks=4)
    first, late, short = hand_out(schedule, {("cpu", 0): 0, ("cpu", 1): 0}, room=4)
    for grant in (first, short, late):  # cpu-0 is done with both of its tickets before cpu-1 is with its one
        assert schedule.accepted_frames == 0
        land(deliveries, grant)
    assert [deliveries.take(min_version=None).number for _ in range(2)] == [0, 1]


def test_a_replaced_worker_gets_the_rounds_it_missed_in_their_order() -> None:
    schedule = make_schedule()
    places = [("cpu", 0), ("cpu", 1)]
    (first, _), _, (second, _), _ = hand_out(schedule, dict.fromkeys(places, 0), room=4)
    schedule.landed(first, places[1], 10)
    for found, place in ((second, places[1]), (first, places[0]), (second, places[0])):
        schedule.lost(found, place)
    again = hand_out(schedule, dict.fromkeys(places, 0), room=4)
    assert [(found.number, slot[1]) for found, slot in again] == [(0, 0), (1, 0), (1, 1)]


def test_workers_take_turns_when_the_consumer_is_slow() -> None:
    schedule = make_schedule("async")
    idle = {("cpu", 0): 0, ("cpu", 1): 0, ("gpu", 0): 0}
    turns = []
    for _ in range(6):
        ((found, slot),) = hand_out(schedule, idle, room=1)
        schedule.landed(found, slot, 10)
        schedule.accepted(found.number)
        turns.append(slot)
    assert turns == [("cpu", 0), ("cpu", 1), ("gpu", 0)] * 2
    # Idle ones come before those that have a ticket.
    ((_, slot),) = hand_out(schedule, {("cpu", 0): 1, ("gpu", 0): 0}, num_workers=3, room=1)
    assert slot == ("gpu", 0)


@pytest.mark.parametrize(
    ("bound", "ahead", "expected"), [(0, 0, 1), (0, 1, 0), (1, 1, 1), (1, 2, 0), (2, 0, 2), (None, 9, 4)]
)
def test_the_bound_on_staleness_limits_how_far_workers_run_ahead(bound: int | None, ahead: int, expected: int) -> None:
    schedule = make_schedule("async", bound=bound)
    assert len(hand_out(schedule, {("cpu", 0): 0, ("cpu", 1): 0}, ahead_of_consumer=ahead)) == expected


@pytest.mark.parametrize(
    ("versions", "has_dataset", "dropped"),
    # Random frames do not hide stale ones. Frames in a dataset count although no learner takes them.
    [((3, 3), False, 10), ((3, 3), True, 10), ((-1, 3), False, 10), ((-1, 4), False, 0), ((-1, -1), False, 0)],
)
def test_stale_frames_are_recollected_unless_stored(versions: Any, has_dataset: bool, dropped: int) -> None:
    schedule = make_schedule(total=10, bound=0)
    deliveries = queue_of(schedule, has_dataset=has_dataset)
    grants = hand_out(schedule, {("cpu", 0): 0, ("cpu", 1): 0})
    for grant, version in zip(grants, versions, strict=True):
        land(deliveries, grant, version=version)
    assert schedule.accepted_frames == 10
    assert (deliveries.take(min_version=4) is None) == bool(dropped)
    assert deliveries.dropped == ({"stale": dropped} if dropped else {})
    assert schedule.accepted_frames == (10 if has_dataset else 10 - dropped)
    assert deliveries.blocks.room == (3 if dropped else 1)


@pytest.mark.parametrize(("batches", "limit", "expected"), [(10, 3, 3), (10, 20, 8), (2, 5, 1)])
def test_four_fifths_of_the_object_store_are_lent_at_most(batches: int, limit: int, expected: int) -> None:
    size = LAYOUT.size_bytes
    blocks = RayBlockPool(LAYOUT, limit, store_bytes=batches * size)
    assert (blocks.limit, blocks.room) == (expected, expected)
    with pytest.raises(FleetError, match=f"and {expected + 9} of them must fit into 80%"):
        blocks.resize(expected + 9, at_least=expected + 9)
    assert blocks.limit == expected
    words = f"store has {size:,} bytes on a node, a batch takes up to {size:,} and 1 of them must fit into 80%"
    with pytest.raises(FleetError, match=words):
        RayBlockPool(LAYOUT, limit, store_bytes=size)


def test_what_is_lent_comes_back_and_landed_arrays_are_no_copies() -> None:
    blocks = RayBlockPool(LAYOUT, 1, store_bytes=10 * LAYOUT.size_bytes)
    block_index = blocks.lend()
    with pytest.raises(FleetError, match="all 1 batch slots are in use"):
        blocks.lend()
    sent = Block(LAYOUT)
    sent.num_rows, sent.num_ends = 1, 0
    arrays = {name: array.copy() for name, array in sent.used_arrays().items()}
    for array in arrays.values():
        array.flags.writeable = False  # as Ray hands them out
    blocks.land(block_index, arrays, num_rows=1, num_ends=0)
    landed = blocks.block(block_index)
    assert np.shares_memory(landed.reward, arrays["reward"])
    assert landed.reward.flags.writeable
    blocks.give_back(block_index)
    assert blocks.room == 1


def test_a_look_at_a_sync_round_costs_the_same_for_any_number_of_workers() -> None:
    def cost(workers: int) -> int:
        schedule = make_schedule()
        for index in range(workers):
            schedule.may_collect(("cpu", index), holds=2 * (index == workers - 1))
        return lines_run(lambda: schedule.grants(num_workers=workers, ahead_of_consumer=0, room=workers))

    assert cost(600) == cost(300)
