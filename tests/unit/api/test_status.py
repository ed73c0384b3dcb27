"""What `/v1/status` says of variants and rates, and when it says that a job waits for a learner; what the live page
plots (`Past`), which part of an observation is a picture, and what is sent of it.
"""

import io
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from math import inf, isnan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cormorant_api.control.metrics import RateWindow
from cormorant_api.ledger import Ledger
from cormorant_api.live.moments import Past
from cormorant_api.live.previews import find_picture, newest_frame, png_of
from cormorant_api.status import wait_for_learner
from cormorant_contract.rest.live import Sample
from cormorant_testing.clock import Clock
from cormorant_testing.stats import group_stats, make_stats
from cormorant_worker.fleet.slot import WorkerStats
from cormorant_worker.fleet.stats import FleetStats, GroupStats
from cormorant_worker.logs import LogTail
from cormorant_worker.spaces import Leaf


@pytest.mark.parametrize(
    ("frames_now", "num_waiting", "queued", "group", "sentence"),
    [
        (100, 0, 1, group_stats(), "waiting for a learner: no consumer has asked for batches yet"),
        (200, 0, 1, group_stats(), ""),
        (100, 0, 0, group_stats(), ""),
        (100, 1, 1, group_stats(), ""),
        (100, 0, 1, GroupStats(desired=1, alive=1), ""),
    ],
)
def test_full_queue_without_consumer_waits(
    frames_now: int, num_waiting: int, queued: int, group: GroupStats, sentence: str
) -> None:
    rates = sampled((0, make_stats(stepped_frames=100)), (5, make_stats(stepped_frames=frames_now)))
    feeder = SimpleNamespace(num_waiting=num_waiting)
    ledger = Ledger(epoch="e", ack_within_s=60, on_settled=lambda _: Future())
    running = SimpleNamespace(feeder=feeder, ledger=ledger)
    head: Any = SimpleNamespace(rates=rates, running=running, is_draining=False)
    # As `/v1/status` asks for them: without workers.
    stats = make_stats(queued_batches=queued, workers=(), groups={"cpu": group})
    assert wait_for_learner(head, stats) == sentence


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


def test_rates_cover_the_last_ten_seconds() -> None:
    def stats(n: int, *workers: WorkerStats) -> FleetStats:
        return make_stats(stepped_frames=n, workers=workers, inference={"act": {"rows": 2.0 * n, "act_s": n / 400}})

    counted = [(now, stats(n, worker(n))) for now, n in ((0, 0), (20, 2000), (30, 2500))]
    rates = sampled(*counted, (30, stats(2500)))  # workers are in some samples only
    assert (rates.rate(), rates.rate_of("cpu-0", 0)) == (50.0, 50.0)
    found = [rates.rate(key) for key in (("act", "rows"), ("act", "act_s"), ("act", "acts"), ("b", "rows"))]
    assert found == [100.0, 0.125, 0.0, 0.0]


def test_a_replacement_counts_from_zero() -> None:
    rates = sampled((0, make_stats(workers=(worker(1000),))), (2, make_stats(workers=(worker(10, attempt=1),))))
    assert (rates.rate_of("cpu-0", 1), rates.rate_of("cpu-0", 0), rates.rate_of("cpu-9", 0)) == (5.0, 0.0, 0.0)


def test_long_past_keeps_the_whole_run_in_few_samples() -> None:
    past = Past(fine=10, coarse=8)
    for second in range(1000):
        past.add(Sample(at=second, per_second=second))
    told = past.told()
    assert told.at[-10:] == tuple(range(990, 1000))
    assert len(told.at) <= 18
    assert list(told.at) == sorted(set(told.at))
    coarse = told.at[:-10]
    assert len({later - earlier for earlier, later in pairwise(coarse)}) == 1, "evenly"
    assert (told.at[0], len(coarse) >= 4) == (0, True)


def test_sample_has_band_length_staleness_and_shares() -> None:
    past = Past()
    groups = {"cpu": group_stats(spent_s={"env": 10.0, "idle": 5.0}, min_version=3), "empty": GroupStats()}
    recent = {("return", ""): tuple(map(float, range(11))), ("length", ""): (2, 4)}
    stats = make_stats(recent=recent, version=5, groups=groups)
    first = past.sample(stats, at=100.0, per_second=12.34)
    assert (first.mean_return, first.return_low, first.return_high) == (5.0, 1.0, 9.0)
    assert (first.mean_length, first.staleness, first.time_shares) == (3.0, 2.0, {})
    later = {"cpu": group_stats(spent_s={"env": 13.0, "idle": 6.0}, min_version=5)}
    second = past.sample(replace(stats, groups=later), at=101.0, per_second=12.34)
    assert (second.staleness, second.time_shares) == (0.0, {"env": 0.75, "idle": 0.25})
    replaced = {"cpu": group_stats(spent_s={"env": 4.0, "idle": 7.0})}
    third = past.sample(replace(stats, groups=replaced), at=102.0, per_second=0)
    assert third.time_shares == {"idle": 1.0}, "a worker that takes its time along has no negative share"


def test_returns_of_inf_and_minus_inf_are_no_number_and_no_error() -> None:
    stats = make_stats(recent={("return", ""): (inf, -inf, 1.0, 2.0, 3.0)})
    for told in (Past().sample(stats, at=0.0, per_second=0.0), stats.summary()):
        assert told.mean_return is not None
        assert isnan(told.mean_return)


def test_log_tail_keeps_the_last_lines_with_their_fields() -> None:
    tail = LogTail(size=2)
    for number in range(3):
        tail(None, "info", {"event": "worker_lost", "level": "warning", "worker": f"cpu-{number}", "job": "pong"})
    assert [(line.number, line.level, line.text) for line in tail.since(0)] == [
        (1, "warning", "worker_lost worker=cpu-1"),
        (2, "warning", "worker_lost worker=cpu-2"),
    ]
    assert tail.since(3) == []


def leaf(*shape: int, dtype: type = np.uint8) -> Leaf:
    return Leaf(key=("observation",), shape=shape, dtype=np.dtype(dtype))


@pytest.mark.parametrize(
    ("shape", "newest"),
    [
        ((84, 84), lambda p: p),
        ((4, 84, 84), lambda p: p[3]),
        ((84, 84, 4), lambda p: p[:, :, 3]),
        ((210, 160, 3), lambda p: p),
        ((3, 96, 72), lambda p: np.moveaxis(p, 0, -1)),
        ((12, 96, 72), lambda p: np.moveaxis(p[9:], 0, -1)),
        ((4, 210, 160, 3), lambda p: p[3]),
        ((1000, 400), lambda p: p[::3, ::3]),
    ],
)
def test_the_newest_frame_comes_out_as_it_is(shape: tuple[int, ...], newest: object) -> None:
    pixels = (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)
    expected = newest(pixels)  # type: ignore[operator]  # a function of the table
    frame = newest_frame(pixels)
    assert np.array_equal(frame, expected)
    with Image.open(io.BytesIO(png_of(frame))) as image:
        image.load()
        assert image.mode == ("L" if frame.ndim == 2 else "RGB")
        assert np.array_equal(np.asarray(image), frame)


def test_the_largest_picture_is_taken_which_has_two_sides_of_bytes() -> None:
    others = (leaf(), leaf(4), leaf(4, dtype=np.float32), leaf(500, 500, dtype=np.float32), leaf(2, 2), leaf(4, 3, 90))
    assert [find_picture((other,)) for other in others] == [None] * 6
    assert find_picture((*others, leaf(8, 8), leaf(64, 64, 3))) == 7
