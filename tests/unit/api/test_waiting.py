"""When `/v1/status` and the command line say that a job waits for a learner."""

from dataclasses import dataclass, field

from cormorant_api.batches.ledger import Ledger
from cormorant_api.control.rates import RateWindow
from cormorant_api.status import wait_for_learner
from cormorant_testing.stats import make_stats


@dataclass
class BatchFeeder:
    num_waiting: int = 0


@dataclass
class Running:
    feeder: BatchFeeder = field(default_factory=BatchFeeder)
    ledger: Ledger = field(default_factory=lambda: Ledger(epoch="e", ack_within_s=60))


@dataclass
class Head:
    rates: RateWindow
    running: Running


def sentence(*, frames_then_now: tuple[int, int], num_waiting: int = 0, queued: int = 1) -> str:
    seconds = iter((0.0, 5.0))
    rates = RateWindow(clock=lambda: next(seconds))
    for frames in frames_then_now:
        rates.sample(make_stats(stepped_frames=frames))
    # As `/v1/status` asks for them: without workers.
    stats = make_stats(queued_batches=queued, workers=())
    return wait_for_learner(Head(rates, Running(BatchFeeder(num_waiting))), stats)  # type: ignore[arg-type]  # what it reads


def test_full_queue_without_consumer_waits_for_a_learner() -> None:
    assert sentence(frames_then_now=(100, 100)) == "waiting for a learner: no consumer has asked for batches yet"


def test_fleet_that_steps_waits_for_nobody() -> None:
    assert sentence(frames_then_now=(100, 200)) == ""


def test_fleet_without_batches_waits_for_no_learner() -> None:
    assert sentence(frames_then_now=(100, 100), queued=0) == ""
    assert sentence(frames_then_now=(100, 100), num_waiting=1) == ""
