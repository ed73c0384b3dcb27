"""What `/v1/status` says of variants and rates, and when it says that a job waits for a learner."""

from types import SimpleNamespace
from typing import Any

import pytest

from cormorant_api.batches.ledger import Ledger
from cormorant_api.control.metrics import RateWindow
from cormorant_api.status import tasks_of, wait_for_learner
from cormorant_testing.stats import make_stats
from cormorant_worker.fleet.stats import FleetStats, WorkerStats


def test_means_of_many_variants_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop describes the job: 64 times the means of 64 variants would hold up every request for a second."""
    names = [f"task-{number}" for number in range(64)]
    asked: list[FleetStats] = []

    def compute(stats: FleetStats) -> dict[tuple[str, str], float | None]:
        asked.append(stats)
        return {("return", name): float(number) for number, name in enumerate(names)} | {("return", "other"): 0.0}

    monkeypatch.setattr(FleetStats, "task_metric_means", property(compute))
    found = tasks_of(make_stats(task_episodes=dict.fromkeys(names, 3)))
    assert len(asked) == 1
    assert [(task.count, task.means) for task in found.values()] == [(3, {"return": float(n)}) for n in range(64)]


@pytest.mark.parametrize(
    ("frames_now", "num_waiting", "queued", "sentence"),
    [
        (100, 0, 1, "waiting for a learner: no consumer has asked for batches yet"),
        (200, 0, 1, ""),
        (100, 0, 0, ""),
        (100, 1, 1, ""),
    ],
)
def test_full_queue_without_consumer_waits(frames_now: int, num_waiting: int, queued: int, sentence: str) -> None:
    seconds = iter((0.0, 5.0))
    rates = RateWindow(clock=lambda: next(seconds))
    for frames in (100, frames_now):
        rates.sample(make_stats(stepped_frames=frames))
    feeder = SimpleNamespace(num_waiting=num_waiting)
    running = SimpleNamespace(feeder=feeder, ledger=Ledger(epoch="e", ack_within_s=60))
    head: Any = SimpleNamespace(rates=rates, running=running)
    # As `/v1/status` asks for them: without workers.
    assert wait_for_learner(head, make_stats(queued_batches=queued, workers=())) == sentence


# -- frames per second over the last seconds ---------------------------------------------------------------------


def worker(frames: int, *, attempt: int = 0) -> WorkerStats:
    return WorkerStats(
        name="cpu-0", attempt=attempt, phase="stepping", frames=frames, version=0, pid=1, env_restarts=0
    )  # fmt: skip


@pytest.fixture
def seconds() -> list[float]:
    return [0.0]


@pytest.fixture
def rates(seconds: list[float]) -> RateWindow:
    return RateWindow(clock=lambda: seconds[0])


def test_worker_rates_need_workers_in_some_samples_only(rates: RateWindow, seconds: list[float]) -> None:
    for now in range(9):
        seconds[0] = now
        rates.sample(make_stats(stepped_frames=100 * now, workers=(worker(50 * now),) if now % 4 == 0 else ()))
    assert (rates.rate(), rates.rate_of("cpu-0", 0)) == (100.0, 50.0)


def test_rates_cover_the_last_ten_seconds(rates: RateWindow, seconds: list[float]) -> None:
    for now, frames in ((0, 0), (20, 1000), (30, 1500)):
        seconds[0] = now
        rates.sample(make_stats(stepped_frames=frames, workers=(worker(frames),)))
    assert (rates.rate(), rates.rate_of("cpu-0", 0)) == (50.0, 50.0)


def test_a_replacement_counts_from_zero(rates: RateWindow, seconds: list[float]) -> None:
    rates.sample(make_stats(workers=(worker(1000),)))
    seconds[0] = 2
    rates.sample(make_stats(workers=(worker(10, attempt=1),)))
    assert (rates.rate_of("cpu-0", 1), rates.rate_of("cpu-0", 0), rates.rate_of("cpu-9", 0)) == (5.0, 0.0, 0.0)


def test_servers_have_rates_by_group(rates: RateWindow, seconds: list[float]) -> None:
    for now in (0.0, 5.0, 20.0, 25.0):
        seconds[0] = now
        rates.sample(make_stats(inference={"act": {"rows": 100.0 * now, "act_s": 0.25 * now}} if now else {}))
    found = [rates.rate_of_servers(*key) for key in (("act", "rows"), ("act", "act_s"), ("act", "acts"), ("b", "rows"))]
    assert found == [100.0, 0.25, 0.0, 0.0]
