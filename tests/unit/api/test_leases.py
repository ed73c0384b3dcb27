"""Pause leases: who holds one, when it ends, and what the keeper does about it."""

import threading
from collections.abc import Iterator

import pytest

from cormorant_api.control.leases import LeaseBook, PauseKeeper
from cormorant_cli.commands.status import printable
from cormorant_contract.rest.pauses import PauseRequest
from cormorant_testing.clock import Clock
from cormorant_testing.scripts import until
from cormorant_worker.errors import ControlTimeout


class Brakes:
    """Counts what the keeper does; the first `failing` pauses fail, and leave the fleet half paused."""

    def __init__(self, failing: int = 0) -> None:
        self.done: list[str] = []
        self.happened = threading.Condition()
        self._failing = failing

    def pause(self) -> None:
        if self._failing:
            self._failing -= 1
            raise ControlTimeout("cpu-0 did not pause")
        self._note("pause")

    def resume(self) -> None:
        self._note("resume")

    def wait_for(self, *done: str) -> None:
        with self.happened:
            assert self.happened.wait_for(lambda: self.done == list(done), 30), self.done

    def _note(self, what: str) -> None:
        with self.happened:
            self.done.append(what)
            self.happened.notify_all()


@pytest.fixture
def keepers() -> Iterator[list[PauseKeeper]]:
    made: list[PauseKeeper] = []
    yield made
    for keeper in made:
        keeper.close()


def keep(keepers: list[PauseKeeper], book: LeaseBook, brakes: Brakes, *, starts_paused: bool = False) -> PauseKeeper:
    keeper = PauseKeeper(book, pause=brakes.pause, resume=brakes.resume, starts_paused=starts_paused)
    keepers.append(keeper)
    keeper.start()
    return keeper


def test_an_owner_has_one_lease_and_renews_it() -> None:
    clock = Clock(100.0)
    book = LeaseBook(clock=clock)
    first, is_new = book.grant("learner", reason="eval", ttl_s=10)
    clock.now += 8
    again, is_renewed = book.grant("learner", reason="", ttl_s=10)
    assert (is_new, is_renewed) == (True, False)
    assert (again.id, again.reason, again.deadline) == (first.id, "eval", 118.0)
    clock.now += 8
    assert book.wants_pause
    clock.now += 3
    assert not book.wants_pause
    assert [lease.id for lease in book.expire()] == [first.id]
    assert book.expire() == []


@pytest.mark.parametrize("spec_paused", [False, True])
def test_fleet_is_paused_until_the_last_lease_is_gone_or_longer(*, spec_paused: bool) -> None:
    book = LeaseBook(spec_paused=spec_paused, clock=Clock(100.0))
    one, _ = book.grant("one", reason="", ttl_s=10)
    two, _ = book.grant("two", reason="", ttl_s=10)
    assert (book.end(one.id), book.end(one.id), book.wants_pause) == (one, None, True)
    assert (book.end_of("two"), book.end_of("two"), book.wants_pause) == (two, None, spec_paused)


def test_leases_are_bounded() -> None:
    book = LeaseBook(clock=Clock(100.0))
    for number in range(1000):
        book.grant(f"owner-{number}", reason="", ttl_s=10)
    with pytest.raises(OverflowError, match="1000 pause leases are held"):
        book.grant("one too many", reason="", ttl_s=10)
    _, is_new = book.grant("owner-5", reason="", ttl_s=10)
    assert not is_new


def test_the_keeper_pauses_and_resumes_once_each(keepers: list[PauseKeeper]) -> None:
    book, brakes = LeaseBook(), Brakes()
    keeper = keep(keepers, book, brakes)
    one, _ = book.grant("one", reason="", ttl_s=100)
    keeper.nudge()
    brakes.wait_for("pause")
    two, _ = book.grant("two", reason="", ttl_s=100)
    book.end(one.id)
    keeper.nudge()
    book.end(two.id)
    keeper.nudge()
    brakes.wait_for("pause", "resume")


def test_a_lease_whose_owner_died_ends_by_itself(keepers: list[PauseKeeper]) -> None:
    book, brakes = LeaseBook(), Brakes()
    keeper = keep(keepers, book, brakes)
    book.grant("dead", reason="", ttl_s=0.05)
    keeper.nudge()
    brakes.wait_for("pause", "resume")


def test_a_fleet_that_starts_paused_goes_on_without_leases(keepers: list[PauseKeeper]) -> None:
    brakes = Brakes()
    keep(keepers, LeaseBook(), brakes, starts_paused=True)
    brakes.wait_for("resume")


def test_a_pause_that_fails_is_tried_again_and_told(keepers: list[PauseKeeper]) -> None:
    book, brakes = LeaseBook(), Brakes(failing=1)
    keeper = keep(keepers, book, brakes)
    book.grant("one", reason="", ttl_s=100)
    assert keeper.state == "draining"
    keeper.nudge()
    brakes.wait_for("pause")


def test_a_pause_that_failed_is_resumed_when_its_lease_ends(keepers: list[PauseKeeper]) -> None:
    book, brakes = LeaseBook(), Brakes(failing=1000)
    keeper = keep(keepers, book, brakes)
    lease, _ = book.grant("one", reason="", ttl_s=100)
    keeper.nudge()
    assert keeper.state == "draining"
    until(lambda: keeper.error != "")
    book.end(lease.id)
    assert keeper.state == "paused", "it does not run before it was resumed"
    keeper.nudge()
    brakes.wait_for("resume")
    until(lambda: keeper.state == "running")
    assert keeper.error == ""


def test_draining_fleet_is_not_paused_by_leases(keepers: list[PauseKeeper]) -> None:
    book, brakes = LeaseBook(), Brakes()
    keeper = keep(keepers, book, brakes)
    book.grant("one", reason="", ttl_s=100)
    keeper.nudge()
    brakes.wait_for("pause")
    keeper.overrule()
    brakes.wait_for("pause", "resume")
    book.grant("two", reason="", ttl_s=100)
    keeper.nudge()
    until(lambda: keeper.is_settled)
    assert (keeper.state, brakes.done) == ("running", ["pause", "resume"])


def test_a_reason_has_nothing_that_a_terminal_would_obey() -> None:
    assert PauseRequest(reason="évaluation, 10 min").reason == "évaluation, 10 min"
    with pytest.raises(ValueError, match=r"contains the control character '\\x1b'"):
        PauseRequest(reason="\x1b]0;owned\x07")
    assert printable("by ops: \x1b[2J\x07 done") == r"by ops: \x1b[2J\x07 done"
