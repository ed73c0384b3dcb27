"""Declared keys of info from subprocesses, EnvPool and fleets, frame by frame."""

from pathlib import Path

import pytest

from cormorant_testing.collecting import make_job
from cormorant_testing.datasets import iter_frames
from cormorant_testing.fleets import make_fleet, on_all_placements_slowly
from cormorant_testing.info import INFO, METRICS, assert_info, expected_metrics
from cormorant_worker.errors import CormorantError
from cormorant_worker.launch import make_collector
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.sinks.dataset import existing_dataset


def test_envpool_info_is_stored_as_declared_or_names_what_it_has() -> None:
    env = {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4, "numThreads": 1}}
    with make_collector(make_job(env=env, info=[{"key": "elapsed_step", "dtype": "float32"}])) as collector:
        assert collector.collect(num_steps=8)["next", "info", "elapsed_step"].tolist() == [[1.0, 2.0]] * 4
    with pytest.raises(CormorantError, match=r"CartPole-v1 has no elapsed_steps .* did you mean elapsed_step"):
        make_collector(make_job(env=env, info=[{"key": "elapsed_steps"}]))


@on_all_placements_slowly
def test_info_of_a_fleet_and_its_dataset_is_exact(engine: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "data")
    job = make_job(
        num_envs=3, info=INFO, dataset=uri, queue={}, lengths=(4, 3, 7), ends="alternate",
        collection={"mode": "sync", "framesPerBatch": 30, "totalFrames": 200, "episodeMetrics": list(METRICS)},
    )  # fmt: skip
    played = 0
    with make_fleet(job, workers=2) as fleet:
        for batch in LocalFleet(fleet).batches():  # the last round is short, and has a mask
            assert_info(batch)
            played += int(batch["next", "done"].sum())
        stats = fleet.stats()
    assert stats.episodes == played > 30
    assert {name: len(values) for name, values in stats.recent_metrics.items()} == dict.fromkeys(
        (metric["name"] for metric in METRICS), played
    )
    expected = [expected_metrics(1, length) | {"success": 0} for length in stats.recent_lengths]
    for name in ("steps", "mean_step", "longest", "any_even"):
        assert list(stats.recent_metrics[name]) == [episode[name] for episode in expected]
    assert set(stats.recent_metrics["success"]) == {0.0, 1.0}
    frames = [frames.to_tensordict() for frames in iter_frames(existing_dataset(uri))]
    assert sum(len(part) for part in frames) == 200
    for part in frames:
        assert_info(part)
