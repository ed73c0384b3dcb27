"""Variants and declared info in subprocesses, in EnvPool, in fleets: in batches, datasets, exports, over HTTP. Outputs
in bfloat16.
"""

import re
from functools import partial
from pathlib import Path

import minari
import numpy as np
import pyarrow.compute
import pyarrow.parquet
import pytest
import torch
from tensordict import TensorDictBase

from cormorant_client import connect
from cormorant_contract.job import CollectorJob
from cormorant_testing.collecting import make_job
from cormorant_testing.datasets import iter_frames
from cormorant_testing.fleets import make_fleet, on_all_placements_slowly
from cormorant_testing.info import INFO, METRICS, assert_info, expected_metrics
from cormorant_testing.scripts import until
from cormorant_testing.serving import serve
from cormorant_worker.errors import CormorantError, DatasetMismatch, ManifestError
from cormorant_worker.launch import make_collector, open_fleet
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.sinks.dataset import existing_dataset
from cormorant_worker.sinks.export import export
from cormorant_worker.sinks.reader import read_dataset

VARIANTS = [{"name": "easy", "kwargs": {"lengths": [3]}}, {"name": "hard", "kwargs": {"lengths": [7]}}]


def test_each_variant_of_envpool_has_its_own_kwargs() -> None:
    cheetah = {"envpool": {"taskId": "HalfCheetah-v4", "numEnvs": 4, "numThreads": 2}}
    variants = [
        {"name": "free", "kwargs": {"ctrl_cost_weight": 0.0}},
        {"name": "dear", "kwargs": {"ctrl_cost_weight": 1000.0}, "weight": 3},
    ]
    with make_collector(make_job(env=cheetah, variants=variants)) as collector:
        batch = collector.collect(num_steps=80)
    assert batch["collector", "task_id"][:, 0].tolist() == [0, 1, 1, 1]
    reward = batch["next", "reward"].squeeze(-1)
    assert (reward[0] > -50).all()
    assert (reward[1:] < -50).any(dim=1).all()


def test_tasks_of_envpool_must_have_the_same_spaces() -> None:
    lake = {"envpool": {"taskId": "FrozenLake-v1", "numEnvs": 4}}
    variants = [{"name": "small"}, {"name": "large", "taskId": "FrozenLake8x8-v1"}]
    with pytest.raises(CormorantError, match=r"variants of spec.env have different spaces: large has .*; small has"):
        make_collector(make_job(env=lake, variants=variants))
    variants[1]["taskId"] = "FrozenLake8x9-v1"
    with pytest.raises(CormorantError, match='variant large: EnvPool has no task "FrozenLake8x9-v1"; did you mean'):
        make_collector(make_job(env=lake, variants=variants))


def test_a_fleet_stores_and_exports_the_ids(tmp_path: Path) -> None:
    data, job = str(tmp_path / "data"), {"num_envs": 1, "variants": VARIANTS, "workers": 2}
    total = {"totalFrames": 80, "mode": "sync"}
    with open_fleet(make_job(dataset=data, collection=total, **job), workers=2) as fleet:
        assert fleet.wait_until_done(100)
    dataset = existing_dataset(data)
    described = dataset.description.env["variants"]
    assert [(variant["id"], variant["name"]) for variant in described] == [(0, "easy"), (1, "hard")]
    ids = {frames.part: set(frames.tasks[0].tolist()) for frames in iter_frames(dataset)}
    assert ids == {"cpu-0-0": {0}, "cpu-1-0": {1}}
    frames = next(iter_frames(dataset))
    assert frames.to_tensordict()["collector", "task_id"].tolist() == frames.tasks[0].tolist()
    table = pyarrow.parquet.read_table(export(data, tmp_path / "out", to="parquet").path)
    assert sorted(set(table["task_id"].to_pylist())) == [0, 1]
    episodes = minari.MinariDataset(str(export(data, tmp_path / "minari", to="minari").path)).iterate_episodes()
    lengths = [(set(e.infos["task_id"].tolist()), len(e.rewards)) for e in episodes if e.terminations[-1]]
    assert set(map(str, lengths)) == {"({0}, 3)", "({1}, 7)"}
    ended = read_dataset(data).episodes.filter(pyarrow.compute.field("terminated")).select(["task_id", "length"])
    assert {tuple(row.values()) for row in ended.to_pylist()} == {(0, 3), (1, 7)}
    meta = export(data, tmp_path / "lerobot", to="lerobot").path / "meta"
    tasks = pyarrow.parquet.read_table(meta / "tasks.parquet").to_pandas()["task_index"]
    assert tasks.to_dict() == {"easy": 0, "hard": 1}
    told = pyarrow.parquet.read_table(meta / "episodes")
    assert set(map(tuple, told["tasks"].to_pylist())) == {("easy",), ("hard",)}
    variants = [*VARIANTS[:1], {"name": "harder", "kwargs": {"lengths": [9]}}]
    with (
        pytest.raises(DatasetMismatch, match=r"env.variants: .*hard.* is stored, now it is .*harder"),
        open_fleet(make_job(dataset=data, **job | {"variants": variants}), workers=2),
    ):
        pass


def test_a_learner_gets_ids_and_names(tmp_path: Path) -> None:
    job = make_job(num_envs=2, variants=VARIANTS, queue={"capacityBatches": 2}, step_s=0.001)
    with serve(job, directory=tmp_path) as served:
        for memory in ("auto", "never"):
            with (
                connect(served.server.url, token=served.writer.token) as client,
                client.deliveries(memory=memory) as batches,  # type: ignore[arg-type]  # as a word
            ):
                batch = next(batches)
                assert batch.is_shared == (memory == "auto")
                assert batch.task_names == ("easy", "hard")
                ids = batch.numpy()["collector"]["task_id"]
                assert ids.dtype == np.int64
                assert ids.tolist() == [[0] * 10, [1] * 10]
                assert batch.tensordict()["collector", "task_id"].tolist() == ids.tolist()
        served.fleet.seed(11)
        with connect(served.server.url, token=served.writer.token) as client, client.deliveries() as batches:
            for batch, _ in zip(batches, range(4), strict=False):
                assert batch.numpy()["collector"]["task_id"].tolist() == [[0] * 10, [1] * 10]
        pattern = r'cormorant_episode_metric\{.*name="length",task="hard"\} 7'
        metrics = partial(served.anonymous.get, "/metrics")
        until(lambda: re.search(pattern, metrics().body.decode()))
        assert b'cormorant_episode_metric{collectorjob="counting",name="length",task=""}' not in metrics().body
        tasks = served.reader.get("/v1/status").json["episodes"]["tasks"]
        assert {name: task["means"]["length"] for name, task in tasks.items()} == {"easy": 3, "hard": 7}
        assert tasks["easy"]["count"] > tasks["hard"]["count"] > 0


def test_envpool_info_is_stored_as_declared_or_names_what_it_has() -> None:
    env = {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4, "numThreads": 1}}
    with make_collector(make_job(env=env, info=[{"key": "elapsed_step", "dtype": "float32"}])) as collector:
        assert collector.collect(num_steps=8)["next", "info", "elapsed_step"].tolist() == [[1.0, 2.0]] * 4
    with pytest.raises(CormorantError, match=r"CartPole-v1 has no elapsed_steps .* which has elapsed_step, env_id"):
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
    recent = {name: values for (name, _), values in stats.recent.items()}
    names = ("return", "length", *(metric["name"] for metric in METRICS))
    assert {name: len(values) for name, values in recent.items()} == dict.fromkeys(names, played)
    expected = [expected_metrics(1, length) | {"success": 0} for length in recent["length"]]
    for name in ("steps", "mean_step", "longest", "any_even"):
        assert list(recent[name]) == [episode[name] for episode in expected]
    assert set(recent["success"]) == {0.0, 1.0}
    frames = [frames.to_tensordict() for frames in iter_frames(existing_dataset(uri))]
    assert sum(len(part) for part in frames) == 200
    for part in frames:
        assert_info(part)


# -- outputs in bfloat16: learners get the bits that the policy computed -----------------------------------------


def bfloat16_job(*keys: str, **collection: object) -> CollectorJob:
    asked = {"framesPerBatch": 12, "totalFrames": 48, **({"bfloat16": list(keys)} if keys else {}), **collection}
    return make_job(num_envs=2, policy="cormorant_testing.recurrent:InHalf", lengths=(3, 8), collection=asked)


def check_bits(batch: TensorDictBase) -> None:
    """All of it is what the policy computed, in its dtype and bit by bit."""
    step = batch["observation"][..., 2:3]
    thirds = step.bfloat16() / 3
    assert batch["value"].dtype == torch.float32
    assert torch.equal(batch["value"], step / 3)
    for found, computed in (
        (batch["logits"], torch.cat([thirds, -thirds], -1)),
        (batch["next", "hidden"], batch["hidden"] + thirds),
        (batch["hidden"][batch["is_init"]], torch.full_like(batch["hidden"][batch["is_init"]], 0.1)),
    ):
        assert found.dtype == computed.dtype == torch.bfloat16
        assert torch.equal(found.view(torch.int16), computed.view(torch.int16))


@on_all_placements_slowly
def test_a_fleet_gives_bfloat16_bit_for_bit(engine: str) -> None:
    with make_fleet(bfloat16_job("logits", "hidden", mode="sync"), workers=2) as fleet:
        batches = list(LocalFleet(fleet).batches())
    assert sum(batch.numel() for batch in batches) == 48
    for batch in batches:
        check_bits(batch)


@pytest.mark.parametrize("memory", ["auto", "never"])
def test_a_head_gives_bfloat16_bit_for_bit(tmp_path: Path, memory: str) -> None:
    with serve(bfloat16_job("logits", "hidden"), directory=tmp_path / "head", workers=1) as served:
        client = connect(served.server.url, token=served.data.token)
        frames = 0
        for batch in client.deliveries(memory=memory):
            assert str(batch.numpy()["logits"].dtype) == "float32"
            check_bits(batch.tensordict())
            frames += batch.num_frames
        assert frames == 48


def test_a_collector_gives_bfloat16_and_refuses_unwritten_keys() -> None:
    with make_collector(bfloat16_job("logits", "hidden")) as collector:
        check_bits(collector.collect(num_steps=20))
    with make_collector(bfloat16_job()) as collector:
        assert collector.collect(num_steps=20)["logits"].dtype == torch.float32
    with pytest.raises(ManifestError, match='the policy writes no "x"; it writes logits, value, hidden'):
        make_collector(bfloat16_job("x"))
