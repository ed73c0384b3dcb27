"""What the live page plots: `Past`."""

from dataclasses import replace
from itertools import pairwise

from cormorant_api.live.moments import Past
from cormorant_contract.rest.live import Sample
from cormorant_testing.stats import group_stats, make_stats
from cormorant_worker.logs import LogTail


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


def test_log_tail_keeps_the_last_lines_with_their_fields() -> None:
    tail = LogTail(size=2)
    for number in range(3):
        tail(None, "info", {"event": "worker_lost", "level": "warning", "worker": f"cpu-{number}", "job": "pong"})
    assert [(line.number, line.level, line.text) for line in tail.since(0)] == [
        (1, "warning", "worker_lost worker=cpu-1"),
        (2, "warning", "worker_lost worker=cpu-2"),
    ]
    assert tail.since(3) == []
