"""Pause leases: who holds one, when it ends, and what the keeper does about it."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cormorant_api.control.leases import PauseKeeper
from cormorant_cli.commands.status import printable
from cormorant_contract.rest.control import PauseRequest
from cormorant_testing.clock import Clock
from cormorant_testing.scripts import until
from cormorant_worker.errors import ControlTimeout


class Brakes:
    """Counts what the keeper does; a failing pause leaves the fleet half paused."""

    def __init__(self, *, is_failing: bool = False) -> None:
        self.done: list[str] = []
        self.happened = threading.Condition()
        self.before_resume: Callable[[], object] = lambda: None
        self._is_failing = is_failing

    def pause(self) -> None:
        if self._is_failing:
            raise ControlTimeout("cpu-0 did not pause")
        self._note("pause")

    def resume(self) -> None:
        self.before_resume()
        self._note("resume")

    def wait_for(self, *done: str) -> None:
        with self.happened:
            assert self.happened.wait_for(lambda: self.done == list(done), 30), self.done

    def _note(self, what: str) -> None:
        with self.happened:
            self.done.append(what)
            self.happened.notify_all()


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


def test_a_lease_whose_owner_died_ends_by_itself(keep: Keep) -> None:
    brakes, clock = Brakes(), Clock(100.0)
    keep(brakes, clock=clock).grant("dead", reason="", ttl_s=0.05)
    brakes.wait_for("pause")
    clock.now += 1
    brakes.wait_for("pause", "resume")


def test_a_state_is_told_once_it_is_reached(keep: Keep) -> None:
    brakes, began, may_end = Brakes(), threading.Event(), threading.Event()

    brakes.before_resume = lambda: (began.set(), may_end.wait(30))
    keeper = keep(brakes)
    one, _ = keeper.grant("one", reason="", ttl_s=100)
    brakes.wait_for("pause")
    keeper.end(one.id)
    assert began.wait(30)
    assert keeper.state == "paused"
    keeper.spec_paused = True
    keeper.nudge()
    assert keeper.state == "draining"
    may_end.set()
    brakes.wait_for("pause", "resume", "pause")
    until(lambda: keeper.state == "paused")


def test_a_pause_that_failed_is_resumed_when_its_lease_ends(keep: Keep) -> None:
    brakes = Brakes(is_failing=True)
    keeper = keep(brakes)
    lease, _ = keeper.grant("one", reason="", ttl_s=100)
    assert keeper.state == "draining"
    until(lambda: keeper.error != "")
    keeper.end(lease.id)
    brakes.wait_for("resume")
    until(lambda: keeper.state == "running")
    assert keeper.error == ""


def test_draining_fleet_is_not_paused_by_leases(keep: Keep) -> None:
    brakes = Brakes()
    keeper = keep(brakes)
    keeper.grant("one", reason="", ttl_s=100)
    brakes.wait_for("pause")
    keeper.overrule()
    brakes.wait_for("pause", "resume")
    keeper.grant("two", reason="", ttl_s=100)
    until(lambda: keeper.is_settled)
    assert (keeper.state, brakes.done) == ("running", ["pause", "resume"])


def test_a_reason_has_nothing_that_a_terminal_would_obey() -> None:
    assert PauseRequest(reason="évaluation, 10 min").reason == "évaluation, 10 min"
    with pytest.raises(ValueError, match=r"contains the control character '\\x1b'"):
        PauseRequest(reason="\x1b]0;owned\x07")
    assert printable("by ops: \x1b[2J\x07 done") == r"by ops: \x1b[2J\x07 done"
