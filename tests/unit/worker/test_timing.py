"""Where a worker's time goes: shares of what was measured, and nothing that is lost or counted twice."""

from types import SimpleNamespace

import numpy as np
import pytest

from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_worker.collect.timing import (
    BUILD,
    ENV,
    IDLE,
    INFERENCE,
    NUM_TIMING,
    PAUSED,
    TRANSFER,
    Timing,
    spent_ns,
)


def seconds(numbers: np.ndarray, clock: SimpleNamespace) -> dict[str, float]:
    spent = spent_ns(numbers.tolist(), until_ns=clock.ms * 1_000_000)
    return {name: ns / 1e9 for name, ns in zip(ACTIVITIES, spent, strict=True)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of `Timing`, in `ms`."""
    clock = SimpleNamespace(ms=1_000)
    monkeypatch.setattr("cormorant_worker.collect.timing.monotonic_ns", lambda: clock.ms * 1_000_000)
    return clock


def step(timing: Timing, clock: SimpleNamespace, *, env_ms: int, inference_ms: int, rest_ms: int) -> bool:
    """One vector step that takes so long; whether it was measured."""
    laps = timing.next_laps()
    clock.ms += env_ms + inference_ms + rest_ms
    if laps is not None:
        laps.env_ns += env_ms * 1_000_000
        laps.inference_ns += inference_ms * 1_000_000
        timing.measured(laps)
    return laps is not None


def test_one_step_in_sixteen_stands_for_all(clock: SimpleNamespace) -> None:
    timing = Timing(numbers := np.zeros(NUM_TIMING, dtype=np.int64))
    timing.begin()
    measured = [step(timing, clock, env_ms=3, inference_ms=1, rest_ms=1) for _ in range(33)]
    timing.rest(IDLE)
    assert [i for i, was in enumerate(measured) if was] == [0, 16, 32]
    spent = seconds(numbers, clock)
    assert spent["env"] + spent["inference"] + spent["transfer"] == pytest.approx(0.165)
    assert (spent["env"], spent["inference"]) == pytest.approx((0.099, 0.033))
    found = timing.take()
    assert (found.seconds, found.env_step_s, found.inference_s) == pytest.approx((0.165, 0.003, 0.001))
    assert timing.take().seconds == 0


def test_what_goes_on_is_counted_up_to_now(clock: SimpleNamespace) -> None:
    timing = Timing(numbers := np.zeros(NUM_TIMING, dtype=np.int64))
    clock.ms += 10
    assert seconds(numbers, clock)["build"] == pytest.approx(0.01)
    timing.rest(IDLE)
    clock.ms += 20
    spent = seconds(numbers, clock)
    assert (spent["build"], spent["idle"]) == pytest.approx((0.01, 0.02))


def test_activities_are_numbered_as_the_contract_names_them() -> None:
    assert [ACTIVITIES[i] for i in (ENV, INFERENCE, TRANSFER, IDLE, PAUSED, BUILD)] == [
        "env", "inference", "transfer", "idle", "paused", "build",
    ]  # fmt: skip
