"""Where a worker's time goes: shares of what was measured, and nothing that is lost or counted twice."""

import time

import numpy as np
import pytest

from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker.collect.timing import BUILD, ENV, IDLE, INFERENCE, PAUSED, TRANSFER, Timing, spent_ns
from cormorant_worker.heartbeat_layout import NUM_TIMING


def seconds(numbers: np.ndarray) -> dict[str, float]:
    return {name: ns / 1e9 for name, ns in zip(ACTIVITIES, spent_ns(numbers), strict=True)}


def step(timing: Timing, *, env_s: float, inference_s: float, rest_s: float) -> bool:
    """One vector step that takes so long; whether it was measured."""
    laps = timing.next_laps()
    for length, name in ((env_s, "env_ns"), (inference_s, "inference_ns"), (rest_s, "")):
        began = time.monotonic_ns()
        time.sleep(length)
        if laps is not None and name:
            setattr(laps, name, getattr(laps, name) + time.monotonic_ns() - began)
    if laps is not None:
        timing.measured(laps)
    return laps is not None


def test_one_step_in_sixteen_stands_for_all() -> None:
    numbers = np.zeros(NUM_TIMING, dtype=np.int64)
    timing = Timing(numbers)
    timing.begin()
    began = time.monotonic()
    measured = [step(timing, env_s=0.003, inference_s=0.001, rest_s=0.001) for _ in range(33)]
    timing.rest(IDLE)
    elapsed = time.monotonic() - began
    assert [i for i, was in enumerate(measured) if was] == [0, 16, 32]
    spent = seconds(numbers)
    stepping = spent["env"] + spent["inference"] + spent["transfer"]
    assert stepping == pytest.approx(elapsed, rel=0.05)
    assert spent["env"] > spent["inference"] > 0
    found = timing.take()
    assert found.seconds == pytest.approx(stepping, rel=0.01)
    assert found.env_step_s >= 0.003
    assert found.inference_s >= 0.001
    assert timing.take().seconds == 0


def test_a_pause_is_no_part_of_a_batch() -> None:
    timing = Timing(numbers := np.zeros(NUM_TIMING, dtype=np.int64))
    timing.begin()
    timing.rest(PAUSED)
    time.sleep(0.05)
    timing.begin()
    timing.rest(IDLE)
    assert seconds(numbers)["paused"] >= 0.05
    assert timing.take().seconds < 0.05


def test_what_goes_on_is_counted_up_to_now() -> None:
    timing = Timing(numbers := np.zeros(NUM_TIMING, dtype=np.int64))
    time.sleep(0.01)
    assert seconds(numbers)["build"] >= 0.01
    timing.rest(IDLE)
    before = seconds(numbers)
    time.sleep(0.01)
    assert seconds(numbers)["idle"] >= before["idle"] + 0.01
    assert seconds(numbers)["build"] == before["build"]


def test_memory_that_nobody_has_written_says_nothing() -> None:
    assert spent_ns(np.zeros(NUM_TIMING, dtype=np.int64)) == (0,) * len(ACTIVITIES)


def test_activities_are_numbered_as_the_contract_names_them() -> None:
    assert [ACTIVITIES[i] for i in (ENV, INFERENCE, TRANSFER, IDLE, PAUSED, BUILD)] == [
        "env", "inference", "transfer", "idle", "paused", "build",
    ]  # fmt: skip
