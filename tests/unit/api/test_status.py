"""What `/v1/status` says of variants."""

import pytest

from cormorant_api.status import tasks_of
from cormorant_testing.stats import make_stats
from cormorant_worker.fleet.stats import FleetStats


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
