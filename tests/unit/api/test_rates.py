"""Frames per second over the last seconds: `RateWindow`."""

import pytest

from cormorant_api.control.rates import RateWindow
from cormorant_testing.stats import make_stats
from cormorant_worker.fleet.stats import WorkerStats


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
