"""What judges the chaos schedules finds what it is there for."""

from collections.abc import Callable
from typing import Any

import pytest

from cormorant_testing.chaos.judge import Finding, Judge
from cormorant_testing.chaos.witness import ENTRYPOINT, STEP
from cormorant_testing.collecting import make_job
from cormorant_worker.collect.collector import Collector
from cormorant_worker.launch import make_collector

WITNESS = {"entrypoint": ENTRYPOINT, "vectorization": "inline", "numEnvs": 2, "kwargs": {"saveable": True, "step_s": 0}}
JOB = make_job(env={"gymnasium": WITNESS}, policy="versioned")
IDS = ("collector", "traj_ids")


def begun() -> Collector:
    """Its environments are in the middle of an episode."""
    collector = make_collector(JOB)
    while collector.collect(num_steps=2)["next", "done"].any():
        pass
    return collector


def test_an_id_that_stands_for_two_futures_is_found() -> None:
    judge, first, second = Judge(may_miss=True), begun(), make_collector(JOB)
    second.restore(first.state())
    for collector in (first, second):
        judge.take(collector.collect(num_steps=2))
    with pytest.raises(Finding, match="was delivered twice at one step"):
        judge.finish()


def test_a_stream_that_begins_twice_is_found() -> None:
    judge = Judge()
    for number in (0, 1000):
        batch = make_collector(JOB).collect(num_steps=2)
        batch[IDS] += number
        judge.take(batch)
    with pytest.raises(Finding, match="began 2 times: 2 streams come twice"):
        judge.finish()


def test_frames_that_are_missing_are_found_unless_they_may_be() -> None:
    judge, collector = Judge(), make_collector(JOB)
    for part in range(20):
        batch = collector.collect(num_steps=2)
        if part % 5:
            judge.take(batch)
    with pytest.raises(Finding, match="misses frames"):
        judge.finish()
    judge.may_miss = True
    judge.finish()


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda batch: batch["next", "reward"].add_(1), "reward of frame 0"),
        (lambda batch: batch["collector", "policy_version"].add_(1), "acting version of frame 0"),
        (lambda batch: batch["observation"][..., STEP].add_(1), "next observation of frame 0"),
    ],
)
def test_a_wrong_value_is_found_at_once(break_it: Callable[[Any], object], words: str) -> None:
    batch = begun().collect(num_steps=2)
    break_it(batch)
    with pytest.raises(Finding, match=words):
        Judge().take(batch)
