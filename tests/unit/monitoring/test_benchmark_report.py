"""What `make bench` prints: ratios within a round, and the CPU limit from its two parts."""

import pytest
from benchmarks import report
from benchmarks.runner import Outcome, Sample


def sampled(*rounds: tuple[int, float]) -> Outcome:
    return Outcome(samples=[Sample(frames=frames, seconds=1.0, cpu_seconds=cpu) for frames, cpu in rounds])


def test_limit_is_cores_over_cpu_seconds_of_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "num_cores", lambda: 4)
    outcomes = {
        "bare loop": sampled((100, 2.0), (50, 2.0)),
        "EnvPool alone": sampled((400, 2.0), (200, 2.0)),
        "policy alone": sampled((200, 1.0), (100, 1.0)),
        "cormorant, 1 worker": sampled((200, 3.0), (100, 3.0)),
    }
    # 4 / (2/400 + 1/200) = 400 frames/s in the first round, 200 in the second.
    assert report.limits(outcomes) == [400.0, 200.0]
    found = report.workload_to_json(outcomes)["cormorant, 1 worker"]
    assert (found["ratio"], found["limit_ratio"], found["envpool_ratio"]) == (2.0, 0.5, 0.5)
    assert found["cpu_microseconds_per_frame"] == pytest.approx(22500.0)


def test_random_actions_have_a_limit_without_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "num_cores", lambda: 2)
    outcomes = {"bare loop": sampled((100, 1.0)), "cormorant, 1 worker": sampled((50, 1.0))}
    assert report.limits(outcomes) == [200.0]
    assert report.workload_to_json(outcomes)["cormorant, 1 worker"]["limit_ratio"] == 0.25
