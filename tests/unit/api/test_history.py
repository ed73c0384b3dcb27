"""What the live page plots (`Past`), which part of an observation is a picture, and what is sent of it."""

import io
from dataclasses import replace
from itertools import pairwise
from math import inf, isnan

import numpy as np
import pytest
from PIL import Image

from cormorant_api.live.moments import Past
from cormorant_api.live.previews import find_picture, newest_frame, png_of, size_of
from cormorant_contract.rest.live import Sample
from cormorant_testing.stats import group_stats, make_stats
from cormorant_worker.logs import LogTail
from cormorant_worker.spaces import Array, Leaf


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
    groups = {"cpu": group_stats(spent_s={"env": 10.0, "idle": 5.0}, min_version=3)}
    stats = make_stats(recent_returns=tuple(map(float, range(11))), recent_lengths=(2, 4), version=5, groups=groups)
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
    stats = make_stats(recent_returns=(inf, -inf, 1.0, 2.0, 3.0), recent_lengths=(1,) * 5)
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


def numbered(*shape: int) -> Array:
    return (np.arange(int(np.prod(shape))) % 251).astype(np.uint8).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "newest"),
    [
        ((84, 84), lambda p: p),
        ((1, 84, 84), lambda p: p[0]),
        ((4, 84, 84), lambda p: p[3]),
        ((84, 84, 4), lambda p: p[:, :, 3]),
        ((84, 84, 1), lambda p: p[:, :, 0]),
        ((210, 160, 3), lambda p: p),
        ((3, 96, 72), lambda p: np.moveaxis(p, 0, -1)),
        ((12, 96, 72), lambda p: np.moveaxis(p[9:], 0, -1)),
        ((4, 210, 160, 3), lambda p: p[3]),
        ((1000, 400), lambda p: p[::3, ::3]),
    ],
)
def test_the_newest_frame_comes_out_as_it_is(shape: tuple[int, ...], newest: object) -> None:
    pixels = numbered(*shape)
    expected = newest(pixels)  # type: ignore[operator]  # a function of the table
    frame = newest_frame(pixels)
    assert np.array_equal(frame, expected)
    assert size_of(shape) == frame.shape[:2]
    with Image.open(io.BytesIO(png_of(frame))) as image:
        image.load()
        assert image.mode == ("L" if frame.ndim == 2 else "RGB")
        assert np.array_equal(np.asarray(image), frame)


def test_the_largest_picture_is_taken() -> None:
    leaves = (leaf(4), leaf(8, 8), leaf(64, 64, 3), leaf(500, 500, dtype=np.float32))
    assert find_picture(leaves) == 2


@pytest.mark.parametrize(
    "other", [leaf(), leaf(4), leaf(4, dtype=np.float32), leaf(84, 84, dtype=np.float32), leaf(2, 2), leaf(4, 3, 90)]
)
def test_what_has_not_two_sides_of_bytes_is_no_picture(other: Leaf) -> None:
    assert find_picture((other,)) is None
