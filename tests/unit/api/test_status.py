"""What `/v1/status` says of variants and rates, and when it says that a job waits for a learner."""

from types import SimpleNamespace
from typing import Any

import pytest

from cormorant_api.control.metrics import RateWindow
from cormorant_api.ledger import Ledger
from cormorant_api.status import tasks_of, wait_for_learner
from cormorant_testing.clock import Clock
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
    rates = sampled((0, make_stats(stepped_frames=100)), (5, make_stats(stepped_frames=frames_now)))
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


def sampled(*samples: tuple[float, FleetStats]) -> RateWindow:
    """Rates of a fleet that was sampled at these seconds."""
    clock = Clock()
    rates = RateWindow(clock)
    for clock.now, stats in samples:
        rates.sample(stats)
    return rates


def test_worker_rates_need_workers_in_some_samples_only() -> None:
    def stats(now: int) -> FleetStats:
        return make_stats(stepped_frames=100 * now, workers=(worker(50 * now),) if now % 4 == 0 else ())

    rates = sampled(*((now, stats(now)) for now in range(9)))
    assert (rates.rate(), rates.rate_of("cpu-0", 0)) == (100.0, 50.0)


def test_rates_cover_the_last_ten_seconds() -> None:
    counted = ((0, 0), (20, 1000), (30, 1500))
    rates = sampled(*((now, make_stats(stepped_frames=n, workers=(worker(n),))) for now, n in counted))
    assert (rates.rate(), rates.rate_of("cpu-0", 0)) == (50.0, 50.0)


def test_a_replacement_counts_from_zero() -> None:
    rates = sampled((0, make_stats(workers=(worker(1000),))), (2, make_stats(workers=(worker(10, attempt=1),))))
    assert (rates.rate_of("cpu-0", 1), rates.rate_of("cpu-0", 0), rates.rate_of("cpu-9", 0)) == (5.0, 0.0, 0.0)


def test_servers_have_rates_by_group() -> None:
    served = ((now, {"act": {"rows": 100.0 * now, "act_s": 0.25 * now}} if now else {}) for now in (0, 5, 20, 25))
    rates = sampled(*((now, make_stats(inference=servers)) for now, servers in served))
    found = [rates.rate(key) for key in (("act", "rows"), ("act", "act_s"), ("act", "acts"), ("b", "rows"))]
    assert found == [100.0, 0.25, 0.0, 0.0]
