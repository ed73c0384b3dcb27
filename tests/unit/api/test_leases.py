"""Pause leases: who holds one, when it ends, and what the keeper does about it."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cormorant_api.control.leases import PauseKeeper
from cormorant_cli.commands.status import printable
from cormorant_contract.rest.control import PauseRequest
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


class Keep:
    """Makes keepers whose threads end with the test."""

    def __init__(self) -> None:
        self.made: list[PauseKeeper] = []

    def __call__(self, brakes: Brakes, **settings: Any) -> PauseKeeper:
        self.made.append(PauseKeeper(pause=brakes.pause, resume=brakes.resume, **settings))
        self.made[-1].start()
        return self.made[-1]


@pytest.fixture
def keep() -> Iterator[Keep]:
    made = Keep()
    yield made
    for keeper in made.made:
        keeper.close()


def stopped(clock: Clock, *, spec_paused: bool = False) -> PauseKeeper:
    """A keeper whose thread does not run."""
    return PauseKeeper(pause=lambda: None, resume=lambda: None, spec_paused=spec_paused, clock=clock)


def test_an_owner_has_one_lease_and_renews_it() -> None:
    clock = Clock(100.0)
    keeper = stopped(clock)
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
    class Slow(Brakes):
        def __init__(self) -> None:
            super().__init__()
            self.began, self.may_end = threading.Event(), threading.Event()

        def resume(self) -> None:
            self.began.set()
            assert self.may_end.wait(30)
            super().resume()

    brakes = Slow()
    keeper = keep(brakes)
    one, _ = keeper.grant("one", reason="", ttl_s=100)
    brakes.wait_for("pause")
    keeper.end(one.id)
    assert brakes.began.wait(30)
    assert keeper.state == "paused"
    keeper.spec_paused = True
    keeper.nudge()
    assert keeper.state == "draining"
    brakes.may_end.set()
    brakes.wait_for("pause", "resume", "pause")
    until(lambda: keeper.state == "paused")


def test_a_pause_that_failed_is_resumed_when_its_lease_ends(keep: Keep) -> None:
    brakes = Brakes(failing=1000)
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
