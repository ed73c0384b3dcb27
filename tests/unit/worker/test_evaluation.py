"""An episode's result is a pure function of weights, task, seed and options; what tables say of results."""

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file

from cormorant.policies import mlp
from cormorant_contract.job import CollectorJob
from cormorant_contract.parsing import parse_job
from cormorant_testing.envs import CountingEnv, MaskedAtTimes
from cormorant_testing.functional import CartPole
from cormorant_worker.collect.build import build_collector
from cormorant_worker.collect.overrides import NO_OVERRIDES, WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import EnvCrashed, EnvError, EvaluationError, ManifestError, NonfiniteWeights, PolicyError
from cormorant_worker.evaluation.player import Player, alone
from cormorant_worker.evaluation.results import (
    EpisodeBook,
    PlayedEpisode,
    ResultFolder,
    ResultTable,
    planned_episodes,
    summarize,
    wilson,
)
from cormorant_worker.policy.exploration import ExplorationType, exploring
from cormorant_worker.run_evaluation import evaluate, evaluation_job
from manifest_making import manifest

COUNTING = {"entrypoint": "cormorant_testing.envs:CountingEnv", "vectorization": "inline", "numEnvs": 4}


def job_of(
    folder: Path | str,
    env: Mapping[str, Any],
    *,
    policy: Mapping[str, Any] | None = None,
    max_steps: int = 0,
    **collection: Any,
) -> CollectorJob:
    env = {**env, "maxEpisodeSteps": max_steps}
    output = {"dataset": {"uri": str(folder)}}
    collection = {"framesPerBatch": 64, **collection}
    return parse_job(manifest(env=env, policy=policy or {"random": {}}, collection=collection, output=output))


def counting(folder: Path, *, max_steps: int = 0, **kwargs: Any) -> CollectorJob:
    env = {"gymnasium": {**COUNTING, "kwargs": kwargs}}
    return job_of(folder, env, max_steps=max_steps, seed=5, episodes={"count": 6})


def player_of(job: CollectorJob, overrides: WorkerOverrides = NO_OVERRIDES) -> Player:
    collector = build_collector(alone(job), WorkerPlace(), overrides)
    collector.close()
    return Player(job, collector, overrides=overrides)


@pytest.mark.parametrize("vectorization", ["inline", "subprocess"])
def test_random_episodes_keep_to_the_masks_of_the_info(tmp_path: Path, vectorization: str) -> None:
    env = {"gymnasium": {**COUNTING, "vectorization": vectorization}}
    job = job_of(tmp_path, env, seed=5, episodes={"count": 6})
    assert len(player_of(job, WorkerOverrides(envs=(MaskedAtTimes,))).play(range(6))) == 6


def played_by(job: CollectorJob, *chunks: Sequence[int]) -> dict[int, PlayedEpisode]:
    """Episodes by position, played chunk after chunk by one player."""
    player = player_of(job)
    return {at: row for chunk in chunks for at, row in zip(chunk, player.play(chunk), strict=True)}


MLP = {"entrypoint": "cormorant.policies:mlp"}
CARTPOLE = {"envpool": {"taskId": "CartPole-v1", "numEnvs": 8, "numThreads": 2}}
CASES = {
    "envpool-lstm": (CARTPOLE, {"entrypoint": "cormorant.policies:lstm"}),
    "envpool-random": (CARTPOLE, {"random": {}}),
    "gymnasium-mlp": ({"gymnasium": {"id": "Pendulum-v1", "vectorization": "inline"}}, MLP),
    "mujoco": ({"envpool": {"taskId": "HalfCheetah-v4", "numEnvs": 4}}, MLP),
    "restless": (CARTPOLE, {"entrypoint": "cormorant_testing.policies:Restless"}),  # changes itself when it is called
    "in-half": (CARTPOLE, {"entrypoint": "cormorant_testing.policies:Restless", "dtype": "bfloat16"}),
}


def test_a_policy_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, CARTPOLE, policy={"entrypoint": "cormorant_testing.policies:locked"}, episodes={"count": 1})
    with pytest.raises(PolicyError, match=r"cannot be copied for an episode of its own: TypeError: .* pickle .*lock"):
        player_of(job).play([0])


@pytest.mark.parametrize("deterministic", [True, False], ids=["best", "drawn"])
@pytest.mark.parametrize("case", CASES)
def test_an_episode_does_not_depend_on_its_company(tmp_path: Path, case: str, deterministic: bool) -> None:
    env, policy = CASES[case]
    episodes = {"count": 7, "deterministic": deterministic}
    more = {"normalize": {"observation": {}}} if case == "restless" else {}
    job = job_of(tmp_path, env, policy=policy, max_steps=40, seed=3, episodes=episodes, **more)
    player, outside = player_of(job), random.getstate()
    together = dict(enumerate(player.play(range(7))))
    assert random.getstate() == outside
    assert played_by(job, [6, 1], [4], [0, 2, 3, 5]) == together
    assert played_by(job, [5, 4, 3, 2, 1, 0, 6]) == together
    assert len({(row.total, row.length) for row in together.values()}) > 1


def test_processes_that_write_the_same_results_do_not_meet(tmp_path: Path) -> None:
    rows = [PlayedEpisode(task="", seed=i, options={}, total=1.0, length=3, terminated=True) for i in range(500)]
    folder = ResultFolder(str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: folder.record(rows), range(100)))
    assert len(folder.played()) == 500
    assert len(list((tmp_path / "played").iterdir())) == 1


def test_first_result_of_a_worker_waits_for_a_store_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ResultFolder(f"memory://{uuid.uuid4().hex}")
    put, asked = MemoryFileSystem.pipe_file, []

    def restarting(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        if len(asked) == 1:
            raise OSError("connection refused")
        put(*args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", restarting)
    monkeypatch.setattr("cormorant_worker.sinks.stores._PAUSE_S", 0.0)
    folder.record([row(1, 0.1)])
    assert len(folder.played()) == 1


def test_a_return_that_is_no_finite_number_is_named(tmp_path: Path) -> None:
    generous = gymnasium.wrappers.TransformReward(CountingEnv(), lambda _: np.inf)
    job = job_of(tmp_path, {"gymnasium": COUNTING}, seed=6, episodes={"count": 1})
    with pytest.raises(EnvError, match="the episode with seed 6 has a return of inf after 1 steps"):
        player_of(job, WorkerOverrides(envs=(lambda: generous,))).play([0])


def test_environments_are_built_before_episodes_are_timed(tmp_path: Path) -> None:
    player, told = player_of(counting(tmp_path)), []
    player.on_building = told.append
    player.play([0, 1])
    player.play([2])
    assert told == [True, False, True, False]


def test_reset_options_reach_their_episode(tmp_path: Path) -> None:
    env = {"gymnasium": {"id": "CartPole-v1", "vectorization": "inline", "numEnvs": 2}}
    upright, fallen = {"low": -0.001, "high": 0.001}, {"low": 0.25, "high": 0.26}
    job = job_of(tmp_path, env, episodes={"resetOptions": [upright, fallen]})
    rows = played_by(job, [0, 1])
    assert rows[0].options == upright
    assert rows[1].length == 1 < rows[0].length


def test_an_episode_that_never_ends_is_an_error_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cormorant_worker.evaluation.player.LONGEST", 50)
    with pytest.raises(EnvError, match=r"with seed 5 has not ended after 50 steps; set env\.maxEpisodeSteps"):
        player_of(counting(tmp_path, lengths=1000)).play(range(6))
    assert {row.length for row in played_by(counting(tmp_path, lengths=1000, max_steps=70), [0]).values()} == {70}


def test_a_failing_environment_is_named_by_its_seed_alone(tmp_path: Path) -> None:
    for how, words in ("raise", "raised ValueError"), ("nan", "returned NaN in observation"):
        job = counting(tmp_path, lengths=5, failures=[{"how": how, "step": 2, "seeds": [7]}])
        with pytest.raises(EnvCrashed, match=rf"environment 2 {words}.* \(in the episode with seed 7\)"):
            player_of(job).play(range(4))


def row(seed: int, total: float = 1.0, **metrics: float) -> PlayedEpisode:
    return PlayedEpisode(task="", seed=seed, options={}, total=total, length=seed + 1, terminated=True, metrics=metrics)


def test_wilson_interval_of_known_cases() -> None:
    assert wilson(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson(10, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert wilson(81, 263) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))  # Newcombe 1998


def test_summary_of_known_rows() -> None:
    found = summarize([row(0, 1.0, success=1.0), row(1, 2.0, success=0.0), row(2, 6.0, success=1.0)])
    assert found["return"] | {"low": 0, "high": 0} == {
        "mean": 3.0, "low": 0, "high": 0, "std": pytest.approx(7**0.5), "min": 1.0, "median": 2.0, "max": 6.0
    }  # fmt: skip
    success = found["success"]
    assert (success["rate"], success["successes"], success["episodes"]) == (pytest.approx(2 / 3), 2, 3)
    assert summarize([]) == {"episodes": 0}


def test_results_survive_and_what_is_missing_is_played(tmp_path: Path) -> None:
    job = counting(tmp_path, lengths=2)
    book = EpisodeBook(job)
    assert book.take(4) == (0, 1, 2, 3)
    book.give_back((2, 3))
    assert [book.take(3), book.take(3), book.take(1)] == [(2,), (3,), (4,)], "a worker died in them"
    player = player_of(job)
    for _ in range(2):  # played again, and recorded once
        player.record(player.play([0, 1, 4]))
    again = EpisodeBook(job)
    assert again.take(len(again.pending)) == (2, 3, 5)
    with pytest.raises(EvaluationError, match="3 of 6 episodes were played and are not in"):
        again.finish()
    more = evaluation_job(job, str(tmp_path), episodes=9)
    assert len(EpisodeBook(more).pending) == 3 + 3, "more of them, later"


def subject_job(folder: Path, **changes: Any) -> CollectorJob:
    """An evaluation with fields of its spec replaced, by dotted path."""
    env = {"gymnasium": COUNTING, "info": [{"key": "step", "dtype": "float32", "shape": []}]}
    spec = job_of(folder, env, seed=5, episodes={"count": 6}).to_document()["spec"]
    return parse_job(manifest(**spec | {path.replace(".", "__"): value for path, value in changes.items()}))


@pytest.mark.parametrize(
    ("path", "value", "changed"),
    [
        ("collection.episodeMetrics", [{"name": "steps", "key": "step"}], "collection"),
        ("collection.normalize", {"observation": {"clip": 0.1}}, "collection"),
        ("collection.episodes.deterministic", False, "collection"),
        ("env.gymnasium.kwargs", {"numEnvs": 3}, "env"),
        ("image", "registry/worker:2", "image"),
        ("workerGroups", [{"name": "cpu", "device": "gpu"}], "devices"),
        ("collection.framesPerBatch", 128, ""),
        ("collection.episodes.count", 9, ""),
        ("env.gymnasium.numEnvs", 8, ""),
        ("env.gymnasium.maxRestarts", 3, ""),
        ("workerGroups", [{"name": "other", "resources": {"limits": {"cpu": "2"}}}], ""),
    ],
)
def test_what_changes_a_number_needs_another_folder(tmp_path: Path, path: str, value: Any, changed: str) -> None:
    EpisodeBook(subject_job(tmp_path))
    words = f"holds the results of another evaluation: {changed} was"
    with pytest.raises(EvaluationError, match=words) if changed else nullcontext():
        EpisodeBook(subject_job(tmp_path, **{path: value}))


def test_two_results_of_one_episode_are_an_error(tmp_path: Path) -> None:
    folder = ResultFolder(str(tmp_path))
    folder.record([row(1, 0.1), row(2, 0.2)])
    folder.record([row(2, 0.25)])
    with pytest.raises(EvaluationError, match=r"different results: 0\.2 in 3 steps, then 0\.25 in 3"):
        folder.played()


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("evaluation.json", "[1]", lambda folder: ResultFolder(folder.uri)),
        ("played/a.json", '[{"seed": 1}]', ResultFolder.played),
        ("played/a.json", '{"a": 1}', ResultFolder.played),
    ],
)
def test_file_that_is_no_result_is_named(tmp_path: Path, name: str, text: str, read: Any) -> None:
    folder = ResultFolder(str(tmp_path))
    folder.record([row(1, 0.1)])
    (tmp_path / "played/._of-a-file-system.json").write_bytes(b"\xff")
    assert len(folder.played()) == 1
    (tmp_path / name).write_text(text)
    with pytest.raises(EvaluationError, match=f"^cannot read {name} of {tmp_path}: .*; repair it"):
        read(folder)


def test_parquet_has_the_rows(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    table = ResultTable(planned=2, episodes=(row(1, 0.1, success=1.0), row(2, 0.2)))
    table.write_parquet(tmp_path / "episodes.parquet")
    assert pq.read_table(tmp_path / "episodes.parquet").to_pydict() == {
        "task": ["", ""], "seed": [1, 2], "options": ["{}", "{}"], "return": [0.1, 0.2], "length": [2, 3],
        "terminated": [True, True], "metrics.success": [1.0, None],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("episodes", "played"),
    [
        ({"count": 3}, [(name, seed) for name in ("short", "long") for seed in (5, 6, 7)]),
        # By turns, in the shares of their weights.
        ({"count": 7, "perTask": False}, [("short" if seed in (6, 9) else "long", seed) for seed in range(5, 12)]),
    ],
)
def test_variants_play_every_seed_or_take_turns(
    tmp_path: Path, episodes: Mapping[str, Any], played: list[tuple[str, int]]
) -> None:
    lengths = {"short": 2, "long": 5}
    variants = [{"name": name, "kwargs": {"lengths": n}, "weight": n // 2} for name, n in lengths.items()]
    job = job_of(tmp_path, {"gymnasium": COUNTING, "variants": variants}, seed=5, episodes=episodes)
    last = job.spec.target - 1
    rows = played_by(job, [last, 0, 3], [at for at in range(1, last) if at != 3])
    table = ResultTable.of(planned_episodes(job), {row.key: row for row in rows.values()})
    assert table.is_complete
    assert [(row.task, row.seed) for row in table.episodes] == played
    assert {name: found["length"]["mean"] for name, found in table.tasks.items()} == lengths
    more = evaluation_job(job, str(tmp_path), episodes=9)
    assert [row for row in planned_episodes(more) if row in planned_episodes(job)] == list(planned_episodes(job))


def checkpoint(path: Path, seed: int, *, statistics: Mapping[str, Any] | None = None) -> str:
    """Weights of an MLP for Pendulum, drawn from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        space = gymnasium.spaces.Box(-8, 8, (3,))
        weights = mlp(space, gymnasium.spaces.Box(-2, 2, (1,))).state_dict()
    save_file(weights, path, metadata=statistics and {"cormorant_statistics": json.dumps(statistics)})
    return str(path)


PENDULUM = {"gymnasium": {"id": "Pendulum-v1", "vectorization": "inline", "numEnvs": 4}}


@pytest.mark.parametrize("deterministic", [True, False], ids=["best", "drawn"])
def test_checkpoints_of_a_sweep_have_the_tables_they_have_alone(tmp_path: Path, deterministic: bool) -> None:
    uris = [checkpoint(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2)]
    episodes = {"count": 3, "deterministic": deterministic}
    sweep = job_of(tmp_path, PENDULUM, policy=MLP, max_steps=30, episodes={**episodes, "checkpoints": uris})
    assert sweep.spec.target == 6
    rows = played_by(sweep, [5, 0, 3], [1, 2, 4])
    table = ResultTable.of(planned_episodes(sweep), {row.key: row for row in rows.values()})
    assert list(table.checkpoints) == uris
    for uri, found in table.checkpoints.items():
        policy = {**MLP, "initialWeights": uri}
        alone = job_of(tmp_path, PENDULUM, policy=policy, max_steps=30, episodes=episodes)
        assert found == ResultTable(planned=3, episodes=tuple(played_by(alone, range(3)).values()))
    assert table.document()["checkpoints"] == {
        uri: {"planned": 3, "summary": found.summary, "tasks": {}} for uri, found in table.checkpoints.items()
    }


def test_evaluation_job_has_the_device_and_no_servers_and_refuses_two_seeds(tmp_path: Path) -> None:
    document = job_of(tmp_path, PENDULUM, policy=MLP).to_document()
    document["spec"]["workerGroups"] = [{"name": "cpu"}, {"name": "act", "role": "inference", "replicas": 1}]
    document["spec"]["inference"] = {"maxBatch": 8}
    job = parse_job(document)
    spec = evaluation_job(job, str(tmp_path), episodes=1, device="cuda:0").spec
    assert ([(group.name, group.device) for group in spec.worker_groups], spec.inference) == ([("cpu", "gpu")], None)
    with pytest.raises(ManifestError, match=r"seed 5 .* have a list of 2 seeds; leave seed out"):
        evaluation_job(job, str(tmp_path), episodes=[1, 2], seed=5)


def test_sweeps_keep_the_digest_of_each_file(tmp_path: Path) -> None:
    uri = checkpoint(tmp_path / "1.safetensors", 1)
    job = job_of(tmp_path, PENDULUM, policy=MLP, episodes={"count": 2, "checkpoints": [uri]})
    EpisodeBook(job)
    checkpoint(tmp_path / "1.safetensors", 2)
    with pytest.raises(EvaluationError, match="holds the results of another evaluation: weights was"):
        EpisodeBook(job)


def test_weights_that_are_not_finite_are_refused_by_file(tmp_path: Path) -> None:
    uri = checkpoint(tmp_path / "1.safetensors", 1)
    weights = load_file(uri)
    save_file({name: tensor.index_fill(0, torch.tensor(0), -torch.inf) for name, tensor in weights.items()}, uri)
    initial = job_of(tmp_path, PENDULUM, policy={**MLP, "initialWeights": uri}, episodes={"count": 1})
    sweep = job_of(tmp_path, PENDULUM, policy=MLP, episodes={"count": 1, "checkpoints": [uri]})
    for job in (initial, sweep):
        with pytest.raises(NonfiniteWeights, match=f"more: NaN or infinite values; {uri} was not loaded.*policy.allow"):
            played_by(job, [0])
    policy = {**MLP, "initialWeights": uri, "allowNonfinite": True}
    player_of(job_of(tmp_path, PENDULUM, policy=policy, episodes={"count": 1}))


def test_evaluations_normalize_with_the_statistics_of_the_file(tmp_path: Path) -> None:
    statistics = {"observation": {"count": 4, "mean": [0.5, -0.25, 2.0], "m2": [1.0, 4.0, 9.0], "clip": 1.5}}
    uri = checkpoint(tmp_path / "1.safetensors", 1, statistics=statistics)
    options: dict[str, Any] = {"max_steps": 25, "seed": 3, "normalize": {"observation": {"clip": 1.5}}}
    job = job_of(tmp_path, PENDULUM, policy={**MLP, "initialWeights": uri}, episodes={"count": 2}, **options)
    assert [row.total for row in played_by(job, [0, 1]).values()] == [by_hand(uri, statistics, seed) for seed in (3, 4)]
    plain = checkpoint(tmp_path / "plain.safetensors", 1)
    sweep = job_of(tmp_path, PENDULUM, policy=MLP, episodes={"count": 2, "checkpoints": [uri, plain]}, **options)
    rows = played_by(sweep, [2, 0])  # a file without statistics does not act with another one's
    assert rows[0].total == by_hand(uri, statistics, 3)
    assert rows[2].total == by_hand(plain, {"observation": {**statistics["observation"], "count": 0}}, 3)


def by_hand(uri: str, statistics: Mapping[str, Any], seed: int) -> float:
    """Return of Pendulum's first 25 steps with the best actions on observations normalized in plain numpy."""
    policy = mlp(gymnasium.spaces.Box(-1.5, 1.5, (3,)), gymnasium.spaces.Box(-2, 2, (1,)))
    policy.load_state_dict(load_file(uri))
    found = statistics["observation"]
    mean, variance = np.array(found["mean"]), np.array(found["m2"]) / max(1, found["count"]) + 1e-8
    env, total = gymnasium.make("Pendulum-v1", max_episode_steps=25), 0.0
    raw, _ = env.reset(seed=seed)
    for _ in range(25):
        centered = (raw.astype(np.float64) - mean) / np.sqrt(variance) if found["count"] else raw
        seen = torch.from_numpy(np.clip(centered, -found["clip"], found["clip"]).astype(np.float32))[None]
        with torch.inference_mode(), exploring(ExplorationType.DETERMINISTIC):
            action = policy(seen)[0].numpy()
        raw, reward, *_ = env.step(action)
        total += float(np.float32(reward))
    return total


@pytest.mark.parametrize("kind", ["vector", "jax"])
def test_a_scripts_environment_of_any_kind_is_evaluated(kind: str) -> None:
    env = partial(gymnasium.make_vec, "CartPole-v1", vectorization_mode="sync") if kind == "vector" else CartPole()
    table = evaluate(env=env, policy="cormorant.policies:mlp", episodes=3, workers=1)
    assert table.summary["episodes"] == 3
