"""EnvPool through the collector, bit by bit against a plain pool that is stepped by hand with the stored actions."""

from typing import Any

import envpool
import numpy as np
import pytest
import torch

from cormorant_testing.collecting import SEEDS, make_job
from cormorant_worker.collect.collector import Collector, CollectorConfig
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.errors import EnvBuildError, InvalidAction, PolicyMismatch, UnknownEnv
from cormorant_worker.launch import make_collector
from cormorant_worker.policy.actor import Acted
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.weights.staged import StagedWeights

pytestmark = pytest.mark.filterwarnings("ignore")  # gymnasium warns of EnvPool's bounds


def job_of(
    task: str, num_envs: int, *, policy: str = "", limit: int = 0, collection: dict | None = None, **more: Any
) -> Any:
    kwargs = more.pop("kwargs", {})
    block: dict[str, Any] = {
        "envpool": {"taskId": task, "numEnvs": num_envs, "numThreads": 1, "kwargs": kwargs, **more}
    }
    if limit:
        block["maxEpisodeSteps"] = limit
    frames = {"framesPerBatch": num_envs * 20, **(collection or {})}
    return make_job(env=block, policy=policy, collection=frames)


class Record:
    """The whole stored stream of each environment, over batches."""

    def __init__(self, num_envs: int) -> None:
        self.columns: list[dict[str, list[Any]]] = [{} for _ in range(num_envs)]

    def add(self, batch: Any) -> None:
        masked = ("collector", "mask") in batch.keys(True)
        for b, column in enumerate(self.columns):
            length = int(batch["collector", "mask"][b].sum()) if masked else batch.shape[1]
            for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated"),
                        ("next", "truncated"), ("collector", "traj_ids")):  # fmt: skip
                column.setdefault(str(key), []).extend(batch[key][b, :length].numpy().copy())

    def get(self, column: int, *key: str) -> np.ndarray:
        return np.array(self.columns[column][str(key if len(key) > 1 else key[0])])


def replay(task: str, record: Record, seeds: list[int], **kwargs: Any) -> list[dict[str, list[Any]]]:
    """Step a plain pool in full rows; the step after `done` takes a dummy action and tells how the next begins."""
    n = len(seeds)
    pool = envpool.make(task, env_type="gymnasium", num_envs=n, seed=list(seeds), num_threads=2, **kwargs)
    actions = [record.get(i, "action") for i in range(n)]
    obs, info = pool.reset()
    found: list[dict[str, list[Any]]] = [
        {"observation": [obs[i].copy()], "next": [], "reward": [], "done": [], "truncated": [], "lives": []}
        for i in range(n)
    ]
    used = [0] * n
    is_phantom = [False] * n
    while any(used[i] < len(actions[i]) for i in range(n)):
        row = np.array([
            actions[i][used[i]] if not is_phantom[i] and used[i] < len(actions[i]) else np.zeros_like(actions[i][0])
            for i in range(n)
        ])  # fmt: skip
        obs, reward, terminated, truncated, info = pool.step(row)
        for i in range(n):
            column = found[i]
            if is_phantom[i]:
                is_phantom[i] = False
                assert reward[i] == 0
                column["observation"].append(obs[i].copy())
                continue
            if used[i] >= len(actions[i]):
                continue
            used[i] += 1
            done = bool(terminated[i] or truncated[i])
            column["next"].append(obs[i].copy())
            column["reward"].append(reward[i])
            column["done"].append(done)
            column["truncated"].append(bool(truncated[i]))
            column["lives"].append(int(info["lives"][i]) if "lives" in info else 0)
            is_phantom[i] = done
            if not done:
                column["observation"].append(obs[i].copy())
    return found


def assert_same(record: Record, found: list[dict[str, list[Any]]]) -> None:
    for i, column in enumerate(found):
        steps = len(record.get(i, "action"))
        np.testing.assert_array_equal(record.get(i, "observation"), np.array(column["observation"])[:steps])
        np.testing.assert_array_equal(record.get(i, "next", "observation"), np.array(column["next"]))
        np.testing.assert_array_equal(record.get(i, "next", "reward")[:, 0], np.array(column["reward"], np.float32))
        terminated, truncated = record.get(i, "next", "terminated")[:, 0], record.get(i, "next", "truncated")[:, 0]
        np.testing.assert_array_equal(terminated | truncated, np.array(column["done"]))
        np.testing.assert_array_equal(truncated, np.array(column["truncated"]))
        ids = record.get(i, "collector", "traj_ids")
        np.testing.assert_array_equal(ids[1:] != ids[:-1], (terminated | truncated)[:-1])


@pytest.mark.parametrize(
    ("task", "num_envs", "policy", "sizes", "limit", "more"),
    [
        ("CartPole-v1", 3, "", [200, 101, 300], 0, {}),
        ("CartPole-v1", 4, "cormorant.policies:mlp", [400, 400], 12, {}),
        ("CartPole-v1", 6, "", [300, 301, 300], 0, {"batchSize": 2, "numThreads": 2}),
        ("CartPole-v1", 6, "cormorant.policies:mlp", [60] * 12, 9, {"batchSize": 3, "numThreads": 2}),
        ("Pendulum-v1", 2, "", [150], 30, {}),
        ("Ant-v4", 2, "", [150], 25, {}),
        ("Breakout-v5", 2, "", [300, 300], 0, {"kwargs": {"episodic_life": True}}),
        pytest.param("Breakout-v5", 16, "", [960], 20, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_stored_stream_is_the_plain_pools_bit_by_bit(
    task: str, num_envs: int, policy: str, sizes: list[int], limit: int, more: dict
) -> None:
    record = Record(num_envs)
    with make_collector(job_of(task, num_envs, policy=policy, limit=limit, **more)) as collector:
        assert len(collector.env_groups) == (2 if num_envs == 16 else 1)
        for size in sizes:
            record.add(collector.collect(num_steps=size))
    options = {"max_episode_steps": limit} if limit else {}
    seeds = SEEDS.env_seeds(num_envs)
    found = replay(task, record, seeds, **options, **more.get("kwargs", {}))
    assert_same(record, found)
    if task == "CartPole-v1":
        rewards = np.concatenate([record.get(i, "next", "reward") for i in range(num_envs)])
        assert (rewards == 1.0).all()
        if not limit:
            assert sum(column["done"].count(True) for column in found) > 10
    if more.get("kwargs"):
        # The same game goes on after a life: 4, 3, 2, 1 and the end at 0, then 4 again.
        for column in found:
            lives = [lives for lives, done in zip(column["lives"], column["done"], strict=True) if done]
            assert lives[:5] == [4, 3, 2, 1, 0][: len(lives)]
            assert len(lives) >= 3


@pytest.mark.parametrize("more", [{}, {"batchSize": 2, "numThreads": 2}])
def test_the_time_limit_truncates_and_a_fall_terminates(more: dict) -> None:
    record = Record(4)
    with make_collector(job_of("CartPole-v1", 4, limit=15, **more)) as collector:
        record.add(collector.collect(num_steps=1200))
    lengths: dict[str, set[int]] = {"terminated": set(), "truncated": set()}
    for i in range(4):
        begin = 0
        flags = {name: record.get(i, "next", name)[:, 0] for name in lengths}
        assert not (flags["terminated"] & flags["truncated"]).any()
        for end in np.flatnonzero(flags["terminated"] | flags["truncated"]):
            lengths["terminated" if flags["terminated"][end] else "truncated"].add(int(end) - begin + 1)
            begin = int(end) + 1
    assert lengths["truncated"] == {15}
    assert max(lengths["terminated"]) < 15


@pytest.mark.parametrize("batch_size", [0, 2, 4])
def test_a_pool_steps_with_the_actions_that_batches_hold(batch_size: int) -> None:
    own = torch.empty(16, 1)

    def act(observation: torch.Tensor) -> torch.Tensor:
        # One buffer for all calls: written again while EnvPool steps with what it was given before.
        return own[: len(observation)].uniform_(-2, 2)

    env = {"envpool": {"taskId": "Pendulum-v1", "numEnvs": 16, "batchSize": batch_size, "numThreads": 2}}
    with make_collector(env=env, policy=act) as collector:
        batch = collector.collect(num_steps=3200)
    cos_sin, speed = batch["observation"][..., :2], batch["observation"][..., 2]
    expected = (speed + (15 * cos_sin[..., 1] + 3 * batch["action"][..., 0]) * 0.05).clamp(-8, 8)
    assert torch.allclose(batch["next", "observation"][..., 2], expected, atol=1e-5)


def pools(num_envs: int, *, env_groups: int, threads: int, seed_offset: int = 0) -> list[VectorEnv]:
    task = EnvPoolTask(task_id="CartPole-v1", kwargs={})
    parts = np.array_split(np.array(SEEDS.env_seeds(num_envs)) + seed_offset, env_groups)
    return [task.open(num_threads=threads, seeds=part.tolist()) for part in parts]


def collector_of(envs: list[Any], actor: Any = None) -> Collector:
    random = RandomActor(envs[0].action_space, SEEDS.seed_of("actions"))
    return Collector(
        envs, actor or random, config=CollectorConfig(seeds=SEEDS), warmup=random, weights=StagedWeights({})
    )


def test_data_do_not_depend_on_threads_or_env_groups() -> None:
    found = [
        collector_of(pools(8, env_groups=env_groups, threads=threads)).collect(num_steps=1600)
        for env_groups, threads in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 1))
    ]
    for batch in found[1:]:
        for key in ("observation", "action", ("next", "observation"), ("next", "done")):
            assert torch.equal(batch[key], found[0][key]), key
    first = found[0]["observation"][:, 0]
    assert len({tuple(row.tolist()) for row in first}) == 8
    other = collector_of(pools(8, env_groups=1, threads=1, seed_offset=1)).collect(num_steps=80)
    assert not torch.equal(other["observation"][:, 0], first)


class Sends:
    """An actor that sends one array, and then zeros."""

    outputs = states = initial_states = ()
    device = torch.device("cpu")

    def __init__(self, bad: np.ndarray) -> None:
        self._bad: np.ndarray | None = bad

    def act(self, obs: Any, states: Any, is_init: Any) -> Acted:
        bad, self._bad = self._bad, None
        return Acted((np.zeros(len(is_init), np.int64) if bad is None else bad,))


def test_aborting_actions_never_reach_the_pool() -> None:
    collector = collector_of(pools(3, env_groups=1, threads=1), Sends(np.array([0, 7, 0])))
    with pytest.raises(InvalidAction, match=r"environment 1 is 7 \(1 of 3 environments\), outside Discrete\(2\)"):
        collector.collect(num_steps=9)
    assert (collector.collect(num_steps=9)["next", "reward"] == 1.0).all()
    with pytest.raises(PolicyMismatch):
        make_collector(job_of("CartPole-v1", 2, policy="wrong_shape"))


def test_what_envpool_does_not_know_is_refused_with_a_near_match() -> None:
    def check(task: str, **kwargs: Any) -> None:
        EnvPoolTask(task_id=task, kwargs=kwargs).check()

    with pytest.raises(UnknownEnv, match=r'no task "CartPole-v7"; did you mean CartPole-v'):
        check("CartPole-v7")
    with pytest.raises(EnvBuildError, match="Pong-v5 has no such argument; did you mean frame_skip"):
        check("Pong-v5", frameskip=4)
    with pytest.raises(EnvBuildError, match=r"it is set by spec.env.envpool.numEnvs; remove it here"):
        check("Pong-v5", num_envs=4)
    with pytest.raises(EnvBuildError, match="it is set by the task; remove it here"):
        check("Pong-v5", max_num_players=2)
    with pytest.raises(EnvBuildError, match=r"EnvPool cannot build Pong-v5 with \{'frame_skip': 'four'\}"):
        check("Pong-v5", frame_skip="four")
    check("Pong-v5", frame_skip=4, episodic_life=True)


def test_a_restored_collector_begins_new_episodes_under_new_ids() -> None:
    first = make_collector(job_of("CartPole-v1", 2))
    ids = set(first.collect(num_steps=50)["collector", "traj_ids"].flatten().tolist())
    second = make_collector(job_of("CartPole-v1", 2))
    second.collect(num_steps=11)  # no longer where it started
    second.restore(first.state())
    assert second.frames == 50
    batch = second.collect(num_steps=50)
    assert not ids & set(batch["collector", "traj_ids"].flatten().tolist())
    assert (batch["observation"][:, 0].abs() <= 0.05).all()


def test_pools_that_are_under_way_refuse_what_needs_a_standstill() -> None:
    from cormorant_worker.errors import EnvError, ManifestError

    with make_collector(job_of("CartPole-v1", 4, batchSize=2)) as collector:
        with pytest.raises(EnvError, match="set batchSize: 0"):
            collector.collect(num_episodes=3)
        assert collector.collect(num_steps=40).numel() == 40
    with pytest.raises(ManifestError, match="resetAtEachBatch needs envpool"):
        make_collector(job_of("CartPole-v1", 4, batchSize=2, collection={"resetAtEachBatch": True}))


def test_episodes_of_a_pool_are_whole_and_shared_out_beforehand() -> None:
    with make_collector(job_of("CartPole-v1", 4)) as collector:
        collector.collect(num_steps=10)
        batch = collector.collect(num_episodes=10)
    lengths = batch["collector", "mask"].sum(1)
    assert batch["next", "done"].squeeze(-1).sum(1).tolist() == [1] * 10
    assert batch["next", "reward"].sum((1, 2)).tolist() == lengths.tolist()
    assert (batch["observation"][:, 0].abs() <= 0.05).all()
