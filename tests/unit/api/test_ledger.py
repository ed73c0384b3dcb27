"""Batches that are lent: at least once, never after an acknowledgement, and memory without a reader is returned.
Pause leases: who holds one, when it ends, and what the keeper does about it.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cormorant_api.control.leases import PauseKeeper
from cormorant_api.ledger import BatchFeeder, Ledger
from cormorant_cli.commands.status import printable
from cormorant_testing.clock import Clock
from cormorant_testing.scripts import until
from cormorant_worker.errors import ControlTimeout


@dataclass(eq=False)
class FakeLoan:
    number: int = 0
    num_frames: int = 10
    min_version: int = 5
    releases: int = 0
    acknowledged: int = 0

    def acknowledge(self) -> None:
        self.acknowledged += 1

    def release(self) -> None:
        self.releases += 1


class Books:
    def __init__(self) -> None:
        self.clock, self.settled = Clock(), list[int]()
        kept: Future[None] = Future()
        kept.set_result(None)

        def settle(frames: int) -> "Future[None]":
            self.settled.append(frames)
            return kept

        self.ledger: Ledger = Ledger(epoch="e-1", ack_within_s=60, on_settled=settle, clock=self.clock)

    def add(self, *loans: FakeLoan) -> None:
        for loan in loans:
            self.ledger.add(loan)

    def lend(self, consumer: str = "a") -> str:
        lent = self.ledger.lend(consumer)
        assert lent is not None
        self.ledger.sent(lent.id)
        return lent.id


def test_batch_that_was_given_back_is_freed_while_nobody_asks_for_the_next() -> None:
    books, freed = Books(), threading.Event()

    def borrow(timeout_s: float) -> FakeLoan:
        loan = FakeLoan()
        weakref.finalize(loan, freed.set)
        return loan

    feeder = BatchFeeder(SimpleNamespace(borrow=borrow), books.ledger)  # type: ignore[arg-type]  # its one method
    feeder.start()
    with feeder.demand():
        asyncio.run(books.ledger.notifier.wait_for(lambda: books.ledger.counts().ready, timeout_s=5.0))
    books.ledger.ack(books.lend())
    assert freed.wait(5)
    feeder.close()


def test_close_returns_unread_batches_which_nobody_acknowledges_any_more() -> None:
    books, acked, ready, idle, read = Books(), FakeLoan(), FakeLoan(), FakeLoan(), FakeLoan()
    books.add(acked, idle, read, ready)
    first, held = books.lend(), books.lend()
    books.ledger.ack(first)
    reading = books.ledger.lend("b")
    assert reading is not None
    books.ledger.close()
    assert (ready.releases, idle.releases, read.releases) == (1, 1, 0)
    books.ledger.sent(reading.id)
    assert read.releases == 1
    assert books.ledger.ack(first) is not None
    assert books.ledger.ack(held) is None, "the next head collects its frames again"
    assert books.settled == [10]


@pytest.mark.parametrize(
    "batch_id", ["e-1-2", "e-2-0", "0", "", "e-1-", "e-1-00", "e-1--0", "e-1-0 ", "e-1-\u0660", "é"]
)
def test_ids_that_were_never_given_are_unknown(batch_id: str) -> None:
    books = Books()
    books.add(FakeLoan(), FakeLoan())
    assert not books.ledger.ack(batch_id)
    assert not books.ledger.release(batch_id, 1)


def test_memory_that_a_consumer_maps_goes_back_when_it_lets_go() -> None:
    books, loan, mapped = Books(), FakeLoan(), [True]
    books.add(loan)
    slow = books.lend("slow")
    books.ledger.attach(slow, is_read=lambda: mapped[0])
    books.clock.now = 61
    books.ledger.expire()
    assert books.ledger.ack(books.lend("quick"))
    books.ledger.expire()
    assert loan.releases == 0
    assert books.settled == [10], "the frames are settled, whoever looks at them"
    mapped[0] = False
    books.ledger.expire()
    assert loan.releases == 1


def test_late_release_does_not_take_the_batch_from_the_next() -> None:
    books = Books()
    books.add(FakeLoan(), FakeLoan())
    first = books.lend("dead")
    books.clock.now = 59.9
    assert books.ledger.expire() == 0
    books.clock.now = 60.0
    assert books.ledger.expire() == 1
    again = books.ledger.lend("a")
    assert again is not None
    assert (again.id, again.delivery) == (first, 2), "it comes again, before newer ones"
    assert books.ledger.counts().redelivered == 1
    assert books.ledger.release(first, 1), "it is known, and no longer held by the one who releases it"
    assert books.lend("b") != first
    assert books.ledger.release(first, 2)
    assert books.lend("b") == first


def test_stale_batches_are_dropped_on_request_and_stay_with_who_reads_them() -> None:
    books, read, old = Books(), FakeLoan(min_version=3), FakeLoan(min_version=3)
    books.add(read, old, random := FakeLoan(min_version=-1), FakeLoan(min_version=9))
    slow = books.ledger.lend("slow")
    assert slow is not None
    books.clock.now = 61
    books.ledger.expire()
    lent = books.ledger.lend("a", oldest_version=4)
    assert lent is not None
    assert lent.loan is random
    assert (books.ledger.counts().stale_frames, books.settled) == (20, [10, 20])
    assert (read.releases, old.releases) == (0, 1)
    books.ledger.sent(slow.id)
    assert read.releases == 1


def test_consumers_are_remembered_within_bounds() -> None:
    books = Books()
    for number in range(300):
        books.ledger.lend(f"c{number}")
    names = {consumer.name for consumer in books.ledger.consumers()}
    assert (len(names), "c299" in names) == (256, True)


class LedgerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: no batch is lost, none comes again after its acknowledgement."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.loans: list[FakeLoan] = []
        self.acked: set[str] = set()
        self.reading: list[str] = []
        self.known: list[str] = []

    @rule()
    def add(self) -> None:
        self.loans.append(FakeLoan(number=len(self.loans)))
        self.books.add(self.loans[-1])

    @rule(consumer=st.sampled_from("ab"))
    def lend(self, consumer: str) -> None:
        lent = self.books.ledger.lend(consumer)
        if lent is not None:
            assert lent.id not in self.acked
            assert lent.loan.releases == 0
            self.reading.append(lent.id)
            self.known.append(lent.id)

    @rule(which=st.integers(0, 5))
    def finish_sending(self, which: int) -> None:
        if self.reading:
            self.books.ledger.sent(self.reading.pop(which % len(self.reading)))

    @rule(which=st.integers(0, 20))
    def ack(self, which: int) -> None:
        if self.known:
            batch = self.known[which % len(self.known)]
            assert self.books.ledger.ack(batch)
            self.acked.add(batch)

    @rule(which=st.integers(0, 20), delivery=st.integers(1, 3))
    def release(self, which: int, delivery: int) -> None:
        if self.known:
            assert self.books.ledger.release(self.known[which % len(self.known)], delivery)

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.books.clock.now += seconds
        self.books.ledger.expire()

    @invariant()
    def memory_is_with_the_ledger_until_it_is_acknowledged_and_read(self) -> None:
        for loan in self.loans:
            batch = f"e-1-{loan.number}"
            expected = batch in self.acked and batch not in self.reading
            assert loan.releases == expected, batch
            assert loan.acknowledged == (batch in self.acked), "counted once, however often it was delivered"
        counts = self.books.ledger.counts()
        assert counts.ready + counts.lent + counts.acked == len(self.loans)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_the_ledger_keeps_its_books = LedgerMachine.TestCase


# -- pause leases ------------------------------------------------------------------------------------------------


class Brakes:
    """What the keeper does."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.before_pause: Callable[[], object] = lambda: None
        self.before_resume: Callable[[], object] = lambda: None

    def pause(self) -> None:
        self.before_pause()
        self.done.append("pause")

    def resume(self) -> None:
        self.before_resume()
        self.done.append("resume")


Keep = Callable[..., PauseKeeper]


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Makes keepers whose threads end with the test."""
    made: list[PauseKeeper] = []

    def start(brakes: Brakes, **settings: Any) -> PauseKeeper:
        made.append(PauseKeeper(pause=brakes.pause, resume=brakes.resume, **settings))
        made[-1].start()
        return made[-1]

    yield start
    for keeper in made:
        keeper.close()


def test_an_owner_has_one_lease_and_renews_it() -> None:
    clock = Clock(100.0)
    keeper = PauseKeeper(pause=lambda: None, resume=lambda: None, clock=clock)  # its thread does not run
    first, is_new = keeper.grant("learner", reason="eval", ttl_s=10)
    clock.now += 8
    again, is_renewed = keeper.grant("learner", reason="", ttl_s=10)
    assert (is_new, is_renewed) == (True, False)
    assert (again.id, again.reason, again.deadline) == (first.id, "eval", 118.0)
    clock.now += 8
    assert keeper.wants_pause
    clock.now += 3
    assert not keeper.wants_pause
    later, is_new = keeper.grant("learner", reason="", ttl_s=10)
    assert (is_new, later.id == first.id, later.reason) == (True, False, "")
    assert [lease.id for lease in keeper.held()] == [later.id]
    successor = PauseKeeper(pause=lambda: None, resume=lambda: None)
    successor.grant("another", reason="", ttl_s=10)
    assert successor.end(first.id) is None, "who held a lease of the last head ends no other's"


def test_a_lease_whose_owner_died_ends_by_itself(keep: Keep) -> None:
    brakes, clock = Brakes(), Clock(100.0)
    keep(brakes, clock=clock).grant("dead", reason="", ttl_s=0.05)
    until(lambda: brakes.done == ["pause"])
    clock.now += 1
    until(lambda: brakes.done == ["pause", "resume"])


def test_a_state_is_told_once_it_is_reached(keep: Keep) -> None:
    brakes, began, may_end = Brakes(), threading.Event(), threading.Event()

    brakes.before_resume = lambda: (began.set(), may_end.wait(30))
    keeper = keep(brakes)
    one, _ = keeper.grant("one", reason="", ttl_s=100)
    until(lambda: brakes.done == ["pause"])
    keeper.end(one.id)
    assert began.wait(30)
    assert keeper.state == "paused"
    keeper.spec_paused = True
    keeper.nudge()
    assert keeper.state == "draining"
    may_end.set()
    until(lambda: brakes.done == ["pause", "resume", "pause"])
    until(lambda: keeper.state == "paused")


def test_a_pause_that_failed_is_resumed_when_its_lease_ends(keep: Keep) -> None:
    brakes = Brakes()
    brakes.before_pause = Mock(side_effect=ControlTimeout("cpu-0 did not pause"))
    keeper = keep(brakes)
    lease, _ = keeper.grant("one", reason="", ttl_s=100)
    assert keeper.state == "draining"
    until(lambda: keeper.error != "")
    keeper.end(lease.id)
    until(lambda: brakes.done == ["resume"])
    until(lambda: keeper.state == "running")
    assert keeper.error == ""


def test_draining_fleet_is_not_paused_by_leases(keep: Keep) -> None:
    brakes = Brakes()
    keeper = keep(brakes)
    keeper.grant("one", reason="", ttl_s=100)
    until(lambda: brakes.done == ["pause"])
    keeper.overrule()
    until(lambda: brakes.done == ["pause", "resume"])
    keeper.grant("two", reason="", ttl_s=100)
    until(lambda: keeper.is_settled)
    assert (keeper.state, brakes.done) == ("running", ["pause", "resume"])


def test_a_reason_has_nothing_that_a_terminal_would_obey() -> None:
    assert printable("by ops: \x1b[2J\x07 done") == r"by ops: \x1b[2J\x07 done"
