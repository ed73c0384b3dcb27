"""EnvPool through the collector, bit by bit against a plain pool that is stepped by hand with the stored actions; how
many threads a worker takes, and which CPU.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, get_native_id
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cormorant.policies import mlp
from cormorant_testing.collecting import SEEDS, assert_same, make_job
from cormorant_testing.pools import ByHand
from cormorant_testing.scripts import until
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.build import build_collector
from cormorant_worker.collect.collector import Collector, CollectorConfig
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs import cpus
from cormorant_worker.envs.cpus import OneCpu, native_threads
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.pools import calibrate
from cormorant_worker.errors import EnvBuildError, InvalidAction, ManifestError, PolicyMismatch, UnknownEnv
from cormorant_worker.launch import make_collector
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Space
from cormorant_worker.weights.staged import StagedWeights

pytestmark = pytest.mark.filterwarnings("ignore")  # gymnasium warns of EnvPool's bounds
CARTPOLE, PONG = (EnvPoolTask(task_id=task, kwargs={}) for task in ("CartPole-v1", "Pong-v5"))
needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")


def job_of(task: str, num_envs: int, *, policy: str = "", limit: int = 0, **more: Any) -> Any:
    frames = {"framesPerBatch": num_envs * 20, **more.pop("collection", {})}
    block = {"envpool": {"taskId": task, "numEnvs": num_envs, "numThreads": 1, **more}, "maxEpisodeSteps": limit}
    return make_job(env=block, policy=policy, collection=frames)


KEYS = (
    "observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated"), ("next", "truncated"),
    ("collector", "traj_ids"),
)  # fmt: skip


def streams(*batches: Any) -> list[Any]:
    """All frames of each environment, over batches."""
    every = torch.ones(max(batch.shape[1] for batch in batches), dtype=torch.bool)
    frames = [[row.select(*KEYS)[row.get(("collector", "mask"), every[: len(row)])] for row in b] for b in batches]
    return [torch.cat(rows) for rows in zip(*frames, strict=True)]


def assert_plain(stream: Any, pool: ByHand) -> list[int]:
    """The stored stream is what a plain pool gives for its actions. The lives that were left at the ends."""
    obs, lives = pool.reset(), []
    for seen, action, after, earned, *ended in zip(*(stream[key].numpy() for key in KEYS[:-1]), strict=True):
        np.testing.assert_array_equal(seen, obs)
        obs, reward, *flags = pool.step(action)
        np.testing.assert_array_equal(after, obs)
        assert (earned, ended) == (np.float32(reward), flags)
        if any(flags):
            obs = pool.go_on()
            lives.append(int(pool.info.get("lives", [0])[0]))
    ids, done = stream["collector", "traj_ids"], (stream["next", "terminated"] | stream["next", "truncated"])[:, 0]
    assert torch.equal(ids[1:] != ids[:-1], done[:-1])
    return lives


@pytest.mark.parametrize(
    ("task", "num_envs", "policy", "sizes", "limit", "more"),
    [
        ("CartPole-v1", 3, "", [200, 101, 300], 0, {}),
        ("CartPole-v1", 4, "cormorant.policies:mlp", [400, 400], 12, {}),
        ("CartPole-v1", 6, "", [300, 301, 300], 0, {"batchSize": 2, "numThreads": 2}),
        ("CartPole-v1", 6, "cormorant.policies:mlp", [60] * 12, 9, {"batchSize": 3, "numThreads": 2}),
        ("Ant-v4", 2, "", [150], 25, {}),
        ("Breakout-v5", 2, "", [300, 300], 0, {"kwargs": {"episodic_life": True}}),
        pytest.param("Breakout-v5", 16, "", [960], 20, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_stored_stream_is_the_plain_pools_bit_by_bit(
    task: str, num_envs: int, policy: str, sizes: list[int], limit: int, more: dict
) -> None:
    with make_collector(job_of(task, num_envs, policy=policy, limit=limit, **more)) as collector:
        assert len(collector.env_groups) == (2 if num_envs == 16 else 1)
        played = streams(*(collector.collect(num_steps=size) for size in sizes))
    options = {"max_episode_steps": limit} if limit else {}
    ends = []
    for stream, seed in zip(played, SEEDS.env_seeds(num_envs), strict=True):
        lives = assert_plain(stream, ByHand(task, seed, **options, **more.get("kwargs", {})))
        ends += lives
        assert task != "CartPole-v1" or (stream["next", "reward"] == 1.0).all()
        if more.get("kwargs"):
            # The same game goes on after a life: 4, 3, 2, 1 and the end at 0, then 4 again.
            assert lives[:5] == [4, 3, 2, 1, 0][: len(lives)]
            assert len(lives) >= 3
    assert len(ends) > (10 if task == "CartPole-v1" else 0)


def test_data_do_not_depend_on_threads_or_env_groups() -> None:
    found = []
    for env_groups, threads, offset in ((1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 0), (1, 1, 0), (1, 1, 1)):
        parts = np.array_split(np.array(SEEDS.env_seeds(8)) + offset, env_groups)
        envs = [CARTPOLE.open(num_threads=threads, seeds=part.tolist()) for part in parts]
        random = RandomActor(envs[0].action_space, SEEDS.seed_of("actions"))
        config = CollectorConfig(seeds=SEEDS)
        with Collector(envs, random, config=config, warmup=random, weights=StagedWeights({})) as collector:
            found.append(collector.collect(num_steps=1600).select(*KEYS[:-1]))
    *same, other = found
    assert_same(same, same[:1] * 5)
    first = same[0]["observation"][:, 0]
    assert len(first.unique(dim=0)) == 8
    assert not torch.equal(other["observation"][:, 0], first)


def test_aborting_actions_never_reach_the_pool() -> None:
    actions = torch.zeros(3, dtype=torch.int64)
    env = {"envpool": {"taskId": "CartPole-v1", "numEnvs": 3, "numThreads": 1}}
    with make_collector(env=env, policy=lambda seen: actions[: len(seen)]) as collector:
        actions[1] = 7
        with pytest.raises(InvalidAction, match=r"environment 1 is 7 \(1 of 3 environments\), outside Discrete\(2\)"):
            collector.collect(num_steps=9)
        actions[1] = 0
        assert (collector.collect(num_steps=9)["next", "reward"] == 1.0).all()
    with pytest.raises(PolicyMismatch):
        make_collector(job_of("CartPole-v1", 2, policy="wrong_shape"))


def test_what_envpool_does_not_know_is_refused_with_a_near_match() -> None:
    for kwargs, words in (
        ({"frameskip": 4}, r"cannot build Pong-v5 with \{'frameskip': 4\}: .* unexpected keyword argument"),
        ({"max_num_players": 2}, "the task sets it; remove it here"),
        ({"frame_skip": "four"}, r"EnvPool cannot build Pong-v5 with \{'frame_skip': 'four'\}"),
    ):
        with pytest.raises(EnvBuildError, match=words):
            EnvPoolTask(task_id="Pong-v5", kwargs=kwargs).check()
    with pytest.raises(UnknownEnv, match=r'no task "CartPole-v7"; did you mean CartPole-v'):
        EnvPoolTask(task_id="CartPole-v7", kwargs={}).check()
    EnvPoolTask(task_id="Pong-v5", kwargs={"frame_skip": 4, "episodic_life": True}).check()


def test_pools_that_are_under_way_play_whole_episodes() -> None:
    with make_collector(job_of("CartPole-v1", 4, batchSize=2)) as collector:
        for _ in range(3):
            assert collector.collect(num_steps=40).numel() == 40
            played = collector.collect(num_episodes=9)
            assert (played["observation"][:, 0].abs() <= 0.05).all()
            assert torch.equal(played["next", "done"].sum(1).flatten(), torch.ones(9, dtype=torch.int64))
    with pytest.raises(ManifestError, match="resetAtEachBatch needs envpool"):
        make_collector(job_of("CartPole-v1", 4, batchSize=2, collection={"resetAtEachBatch": True}))


class Disturbed(EnvPoolTask):
    """An environment takes 100 us of a thread; something else runs while two threads are first probed."""

    num_opened, now_s = 0, 0.0

    def open(self, *, num_threads: int, seeds: Sequence[int], **given: Any) -> Any:
        env = super().open(num_threads=num_threads, seeds=seeds, **given)
        seconds, recv = 100e-6 * len(seeds) / num_threads, env.recv
        if num_threads == 2:
            Disturbed.num_opened += 1
            seconds *= 4 if Disturbed.num_opened == 1 else 1

        def recv_later() -> Any:
            Disturbed.now_s += seconds
            return recv()

        env.recv = recv_later  # type: ignore[method-assign]
        return env


def test_a_disturbed_probe_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cormorant_worker.envs.pools.time", SimpleNamespace(perf_counter=lambda: Disturbed.now_s))
    num_threads, _ = calibrate(Disturbed(task_id="CartPole-v1", kwargs={}), num_envs=24, max_threads=2)
    assert (num_threads, Disturbed.num_opened) == (2, 2)


@pytest.mark.parametrize("one_cpu", [False, True])
def test_cheap_envs_get_all_threads_if_timed_and_cpus_stay(one_cpu: bool) -> None:
    # A vector step of one CartPole takes 20 us or more, and 1 us of it is the environment's.
    before = os.sched_getaffinity(0)
    num_threads, step_seconds = calibrate(CARTPOLE, num_envs=512, max_threads=2, one_cpu=one_cpu)
    assert num_threads == 1 or {*step_seconds} == {1, 2}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("num_envs", "max_threads", "num_threads"), [(64, 2, 2), (1, 8, 1), (64, 1, 1)])
def test_images_get_all_threads_without_a_trial(num_envs: int, max_threads: int, num_threads: int) -> None:
    found = calibrate(PONG, num_envs=num_envs, max_threads=max_threads)
    assert found == (num_threads, {})


@contextmanager
def pool_thread() -> Iterator[int]:
    """Native id of a thread that waits."""
    ends, ids = Event(), list[int]()
    thread = Thread(target=lambda: (ids.append(get_native_id()), ends.wait()))
    thread.start()
    while not ids:
        time.sleep(0.001)
    yield ids[0]
    ends.set()
    thread.join()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"V2": "150000 50000"}, 3),
        ({"V2": "max 100000"}, 8),
        ({"V1": "300000", "PERIOD": "100000"}, 3),
        ({"V1": "-1"}, 8),
    ],
)
def test_a_limit_of_cpus_is_read_from_both_versions_of_cgroups(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in (("_QUOTA_V2", "V2"), ("_QUOTA_V1", "V1"), ("_PERIOD_V1", "PERIOD")):
        monkeypatch.setattr(cpus, name, tmp_path / file)
        if file in files:
            (tmp_path / file).write_text(files[file])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert cpus.available_cpus() == expected


@needs_two_cpus
def test_threads_leave_a_cpu_that_others_want_and_try_again_later() -> None:
    before, now_s = os.sched_getaffinity(0), [0.0]

    def keeps() -> bool:
        with cpu:
            assert (
                os.sched_getaffinity(0) == os.sched_getaffinity(pool) == ({cpu.cpu} if cpu.cpu is not None else before)
            )
            kept = cpu.cpu is not None
        assert os.sched_getaffinity(0) == before
        return kept

    with pool_thread() as pool:
        cpu = OneCpu(frozenset({pool}), lambda: now_s[0])
        for _ in range(2):
            assert keeps()
            cpu.judge(wall_s=0.2, cpu_s=0.16)
            assert keeps()
            cpu.judge(wall_s=0.2, cpu_s=0.14)
            now_s[0] += 9.5
            assert not keeps()
            now_s[0] += 0.5


@needs_two_cpus
def test_threads_are_free_again_after_it_gave_up() -> None:
    before = os.sched_getaffinity(0)
    with pool_thread() as stays:
        with pool_thread() as ends:
            cpu = OneCpu(frozenset({stays, ends}))
            with cpu:
                assert os.sched_getaffinity(stays) == {cpu.cpu}
        until(lambda: ends not in native_threads())
        with cpu:
            time.sleep(0.25)  # after a window it counts their time, and one is gone
        assert cpu.cpu is None
        assert os.sched_getaffinity(stays) == before


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(torch_threads)


@needs_two_cpus
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("num_threads", "of_script", "of_policy", "keeps"),
    [(1, 1, 1, True), (2, 1, 1, False), (1, 2, 2, False), (1, 1, 2, False)],
)
def test_a_pool_of_one_thread_keeps_to_the_cpu_of_its_policy(
    num_threads: int, of_script: int, of_policy: int, *, keeps: bool
) -> None:
    """Unless the script or its policy has given torch threads."""

    def make_policy(observation: Space, action: Space) -> nn.Module:
        torch.set_num_threads(of_policy)
        return mlp(observation, action)

    torch.set_num_threads(of_script)
    known = native_threads()
    job = job_of("CartPole-v1", 8, policy="cormorant.policies:mlp", numThreads=num_threads)
    overrides = WorkerOverrides(policy_factory=make_policy, takes_spaces=True)
    with build_collector(job, WorkerPlace(seed=1), overrides) as collector:
        collector.fill(Block(collector.layout(8)), 64)
        pool = [os.sched_getaffinity(thread) for thread in native_threads() - known]
    assert (collector.cpu.cpu is not None) == keeps
    assert ({collector.cpu.cpu} in pool) == keeps
