"""The Tianshou layer, without Tianshou: counts, values, resets, hooks, bad requests."""

import ast
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformObservation
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from cormorant_compat.tianshou import Collector, CollectStats, LatestBatch
from cormorant_postproc import FrameStack, MultiStep, RewardClip
from cormorant_testing.check import Checker
from cormorant_testing.envs import CountingEnv
from cormorant_testing.recurrent import Counter
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import EnvBuildError, EnvError, PolicyError

SEED = 7
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def make(num_envs: int = 3, *, policy: Any = None, env: Mapping[str, Any] | None = None, **more: Any) -> Collector:
    options = {"lengths": (2, 5, 3), **(env or {})}
    more.setdefault("buffer", LatestBatch())
    return Collector(policy or step_mod_5, [CountingEnv(**options) for _ in range(num_envs)], seed=SEED, **more)


def step_mod_5(observation: torch.Tensor) -> torch.Tensor:
    return observation[:, 2].long() % 5


def latest(collector: Collector) -> TensorDict:
    return collector.buffer.tensordict


@given(num_envs=st.integers(1, 4), lengths=LENGTHS, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=15)
def test_n_step_is_exact_in_number_and_in_every_value(num_envs: int, lengths: list[int], sizes: list[int]) -> None:
    options = {"lengths": tuple(lengths), "ends": "alternate"}
    collector = make(num_envs, env=options)
    checker = Checker(job_seed=SEED, num_envs=num_envs, options=options)
    returns = []
    for size in sizes:
        stats = collector.collect(n_step=size)
        assert stats.n_collected_steps == len(collector.buffer) == size
        assert checker.take(latest(collector)) == size
        assert stats.n_collected_episodes == len(stats.lens) == int(latest(collector)["next", "done"].sum())
        assert sorted(stats.lens) == sorted(checker.ended[len(returns) :])
        returns.extend(stats.returns)
    assert collector.collect_step == sum(sizes)
    assert collector.collect_episode == len(returns)


@given(num_envs=st.integers(1, 4), lengths=LENGTHS, counts=st.lists(st.integers(1, 12), min_size=1, max_size=3))
@example(num_envs=3, lengths=[4], counts=[2])  # fewer episodes than environments are played by the first ones
@settings(max_examples=15)
def test_n_episode_is_exact_and_every_environment_has_its_share(
    num_envs: int, lengths: list[int], counts: list[int]
) -> None:
    def depth_image() -> TransformObservation:  # torch cannot fill the padding of such numbers
        space = Box(0, 65_535, (3,), np.uint16)
        return TransformObservation(CountingEnv(lengths=tuple(lengths)), lambda seen: seen[:3].astype(np.uint16), space)

    envs = [depth_image() for _ in range(num_envs)]
    collector = Collector(step_mod_5, envs, seed=SEED, buffer=LatestBatch())
    played = 0
    for count in counts:
        stats = collector.collect(n_episode=count)
        batch = latest(collector)
        assert stats.n_collected_episodes == len(stats.returns) == len(stats.lens) == count
        assert stats.n_collected_steps == len(collector.buffer) == stats.lens.sum()
        shares = [count // num_envs + (b < count % num_envs) for b in range(num_envs)]
        assert batch["next", "done"].squeeze(-1).sum(1).tolist() == shares
        # Everything that was played is stored: no step in vain, no reset in vain, within a call or between calls.
        assert all(row["observation"][0, 2] == 0 for row in batch)
        played += shares[0]
        episodes = batch["observation"][0, :, 1][batch["next", "done"][0, :, 0]]
        assert int(episodes[-1]) == played - 1


def test_statistics_span_calls_until_a_reset() -> None:
    collector = make(2, env={"lengths": 5})
    assert collector.collect(n_step=6).n_collected_episodes == 0
    stats = collector.collect(n_step=6)
    assert (stats.lens.tolist(), stats.returns.tolist()) == ([5, 5], [15.0, 15.0])
    assert stats.collect_speed == pytest.approx(6 / stats.collect_time)
    assert collector.collect_time >= stats.collect_time > 0
    collector.reset(reset_buffer=False)
    assert len(collector.buffer) == 6
    assert (collector.collect_step, collector.collect_episode, collector.collect_time) == (0, 0, 0.0)
    assert collector.collect(n_step=10).lens.tolist() == [5, 5]  # what was open before the reset counts for nothing
    collector.reset(reset_stats=False)
    assert (collector.collect_step, len(collector.buffer)) == (10, 0)


def test_statistics_are_summarized_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    empty = CollectStats.with_autogenerated_stats(np.empty(0), np.empty(0))
    assert (empty.returns_stat, empty.lens_stat, empty.lens.dtype) == (None, None, np.int64)
    stats = CollectStats.with_autogenerated_stats(np.array([1.0, 3.0]), np.array([2, 6]), n_collected_steps=8)
    found = {"mean": 4, "std": 2, "max": 6, "min": 2, "median": 4, "p5": 2.2, "p25": 3, "p75": 5, "p95": 5.8}
    assert asdict(stats.lens_stat) == pytest.approx(found)
    text = stats.pprints_asdict(exclude_fields=["returns", "lens", "returns_stat"], indent=2)
    head, line, *rest = text.splitlines()
    assert (head, line) == ("CollectStats", "-" * 40)
    values = ast.literal_eval("".join(rest))
    assert (values.pop("n_collected_steps"), values.pop("lens_stat")) == (8, asdict(stats.lens_stat))
    assert set(values) == {"n_collected_episodes", "collect_time", "collect_speed"}
    stats.lens_stat.pprint_asdict()
    assert capsys.readouterr().out == stats.lens_stat.pprints_asdict() + "\n"


def test_hidden_states_reset_with_episodes_and_span_calls() -> None:
    collector = make(3, policy=Counter())
    checker = Checker(job_seed=SEED, num_envs=3, options={"lengths": (2, 5, 3)})
    for size in (4, 9, 7):
        collector.collect(n_step=size)
        checker.take(latest(collector))  # count is the number of frames since the trajectory began
    collector.reset_env()
    collector.collect(n_step=3)
    assert latest(collector)["count"].flatten().tolist() == [0, 0, 0]


def test_random_actions_are_the_spaces_and_marked_as_nobodys() -> None:
    collector = make(4, policy=lambda obs: torch.zeros(len(obs), dtype=torch.long))
    collector.collect(n_step=200, random=True)
    assert set(latest(collector)["action"].flatten().tolist()) == {0, 1, 2, 3, 4}
    assert (latest(collector)["collector", "policy_version"] == -1).all()
    collector.collect(n_step=20)
    assert not latest(collector)["action"].any()


class Noting(nn.Module):
    """Notes whether gradients are on, its mode, and that of its inner module, and acts with what has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.inner = nn.Dropout(0.5).eval()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.seen.append((torch.is_grad_enabled(), self.training, self.inner.training))
        return observation[:, :2] * 0 + self.weight


@pytest.mark.parametrize("is_mapping", [False, True])
def test_modules_collect_in_eval_mode_and_with_gradients_where_asked(is_mapping: bool) -> None:
    module = Noting()
    collector = make(2, policy={"policy": module} if is_mapping else module, env={"action": "box"})
    module.seen.clear()
    for no_grad in (True, False, True):
        collector.collect(n_step=4, no_grad=no_grad)
    off, on = (False, False, False), (True, False, False)
    assert module.seen == [off] * 2 + [on] * 2 + [off] * 2
    assert not latest(collector)["action"].requires_grad
    assert (module.training, module.inner.training) == (True, False)


class Options(CountingEnv):
    """Records its resets, and its renderings."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.resets: list[tuple[int | None, Any]] = []
        self.rendered: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets.append((seed, options))
        return super().reset(seed=seed)

    def render(self) -> None:
        self.rendered.append(self._counts.total)

    def close(self) -> None:
        self.is_closed = True


def test_declared_info_is_stored_with_every_frame() -> None:
    collector = make(2, env={"lengths": 3}, info=["step", {"key": "nested.echo"}])
    collector.collect(n_step=8)
    info = latest(collector)["next", "info"]
    assert torch.equal(info["step"], latest(collector)["next", "observation"][..., 2].long())
    assert torch.equal(info["nested.echo"], latest(collector)["action"].double())
    with pytest.raises(EnvBuildError, match="nothing_there is in the info of neither"):
        make(info=["nothing_there"])


def test_reset_arguments_reach_every_reset_and_a_seed_is_spread() -> None:
    envs = [Options(lengths=2) for _ in range(2)]
    collector = Collector(step_mod_5, envs, LatestBatch(), seed=SEED)
    collector.collect(n_step=8, reset_before_collect=True, gym_reset_kwargs={"seed": 5, "options": {"level": 3}})
    collector.collect(n_step=4)
    spread = WorkerPlace(seed=5, index=0).env_seeds(2)
    for env, seed in zip(envs, spread, strict=True):
        first, *rest = env.resets[1:]
        assert first == (seed, {"level": 3})
        assert rest == [(None, {"level": 3})] * 2 + [(None, None)]
    before = latest(collector)["observation"].clone()
    collector.reset(gym_reset_kwargs={"seed": 5})
    collector.collect(n_step=8)
    collector.collect(n_step=4)
    assert torch.equal(latest(collector)["observation"], before)  # a seed reproduces


def test_rendering_follows_every_vector_step_and_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = [Options() for _ in range(2)]
    collector = Collector(step_mod_5, envs, seed=SEED)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    collector.collect(n_step=6, render=0.02)
    assert (slept, envs[0].rendered) == ([0.02] * 3, [1, 2, 3])
    collector.collect(n_step=6)
    collector.collect(n_step=6, render=0.0)
    assert len(envs[0].rendered) == 3


def test_step_hooks_see_every_vector_step_and_may_change_it() -> None:
    seen = []

    def hook(actions: TensorDict, rollout: TensorDict) -> None:
        seen.append((len(rollout), rollout["obs"][:, 2].tolist(), actions["act"].tolist()))
        rollout["rew"].mul_(2)
        rollout["rew"] = rollout["rew"] * 5
        rollout["step"] = rollout["obs"][:, 2].long()

    collector = make(2, env={"lengths": 9}, on_step_hook=hook)
    collector.collect(n_step=5)
    assert seen == [(2, [0.0, 0.0], [0, 0]), (2, [1.0, 1.0], [1, 1]), (1, [2.0], [2])]
    assert latest(collector)["next", "reward"][0].flatten().tolist() == [10.0, 20.0, 30.0]
    assert latest(collector)["hooked", "step"].tolist() == [[0, 1, 2], [0, 1, 0]]
    collector.set_on_step_hook(lambda _, rollout: rollout.set_non_tensor("note", "text"))
    with pytest.raises(TypeError, match="can't convert"):
        collector.collect(n_step=4)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("amount", [{"n_step": 30}, {"n_episode": 4}], ids=str)
def test_a_vector_environment_gives_the_frames_of_single_ones(mode: AutoresetMode, amount: Mapping[str, int]) -> None:
    makers = [partial(CountingEnv, lengths=(2, 5, 3))] * 3
    found = []
    for env in (SyncVectorEnv(makers, autoreset_mode=mode), makers):
        with Collector(step_mod_5, env, LatestBatch(), seed=SEED) as collector:
            collector.collect(**amount)
            found.append(latest(collector))
            if not isinstance(env, list):
                with pytest.raises(EnvError, match="no arguments at a reset"):
                    collector.reset_env({"seed": 3})
    assert (found[0] == found[1]).all()


def test_a_policy_is_tried_with_as_many_rows_as_there_are() -> None:
    rows = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        rows.append(len(observation))
        return torch.arange(3)[: len(observation)]

    make(3, policy=policy).collect(n_step=6)
    assert rows == [3, 3, 3]


def test_episode_hooks_see_whole_episodes_and_add_to_them() -> None:
    collector = make(
        2,
        env={"lengths": (3,)},
        on_episode_done_hook=lambda episode: {"to_go": episode["rew"].flip(0).cumsum(0).flip(0).numpy()},
    )
    collector.collect(n_episode=3)
    added = latest(collector)["hooked", "to_go"]
    assert added[0].tolist() == pytest.approx([6.0, 5.0, 3.0, 6.003, 5.002, 3.001])
    with pytest.raises(ValueError, match=r"returned \['to_go'\] with n_step"):
        collector.collect(n_step=20)


def test_episode_hooks_see_episodes_that_began_in_earlier_calls() -> None:
    lengths: list[int] = []
    collector = make(2, env={"lengths": (5,)}, on_episode_done_hook=lambda episode: lengths.append(len(episode)))
    for n_step in (5, 6, 7, 6):  # uneven batches have a mask
        if n_step == 6:  # in the middle of an episode
            collector.set_on_step_hook(lambda _, rollout: rollout.set("one", torch.ones(len(rollout))))
        collector.collect(n_step=n_step)
    assert lengths == [5, 5, 5, 5]
    collector.set_on_episode_done_hook(None)
    collector.collect(n_step=10)
    assert len(lengths) == 4


def test_transforms_run_before_storing() -> None:
    transforms = [RewardClip(0, 1), FrameStack(2), MultiStep(1.0, 2)]
    collector = make(2, env={"lengths": (4,)}, transforms=transforms)
    assert collector.collect(n_step=8).returns.tolist() == [10.0, 10.0]
    batch = latest(collector)
    assert batch["next", "reward"][0].flatten().tolist() == [2.0, 2.0, 2.0, 1.0]
    assert batch["observation"][0, :, :, 2].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]


def test_an_environment_that_raises_is_named() -> None:
    collector = make(2, env={"failures": [{"how": "raise", "step": 3}]})
    with pytest.raises(ValueError, match="told to fail") as raised:
        collector.collect(n_step=20)
    assert raised.value.__notes__ == ["in environment 0, after 2 completed steps"]


def test_a_call_that_raised_is_followed_by_new_episodes() -> None:
    stops_at = [3]

    def policy(observation: torch.Tensor) -> torch.Tensor:
        if observation[0, 2] == stops_at[0]:
            raise KeyboardInterrupt
        return step_mod_5(observation)

    episodes: list[list[float]] = []
    collector = make(
        2,
        policy=policy,
        env={"lengths": 5},
        on_episode_done_hook=lambda seen: episodes.append(seen["obs"][:, 2].tolist()),
    )
    collector.collect(n_step=4)
    with pytest.raises(KeyboardInterrupt):
        collector.collect(n_step=20)
    stops_at[0] = -1
    assert collector.collect(n_step=10).lens.tolist() == [5, 5]
    assert episodes == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


class TooSmall(LatestBatch):
    _storage = SimpleNamespace(max_size=10)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, "n_step None and n_episode None: give exactly one"),
        ({"n_step": 3, "n_episode": 3}, "n_step 3 and n_episode 3: give exactly one"),
        ({"n_step": 0}, "n_step 0 is not a number of them"),
        ({"n_step": 2.5}, "n_step 2.5"),
        ({"n_step": True}, "n_step True"),
        ({"n_step": 3, "gym_reset_kwargs": {"seed": 5}}, "seed 5 and nothing is reset when collecting begins; add res"),
        ({"n_step": 12}, "the buffer holds 10 frames of 3 environments, and n_step 12 brings"),
        ({"n_episode": 11}, "the buffer holds 10 frames of 3 environments, and n_episode 11 brings at least 11"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_stepped(request_: dict[str, Any], words: str) -> None:
    collector = make(3, buffer=TooSmall())
    with pytest.raises(ValueError, match=words):
        collector.collect(**request_)
    collector.collect(n_step=3)
    assert not latest(collector)["observation"][:, :, 2].any()  # the very first frames


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"env": "CartPole-v1"}, EnvError, "environments are str"),
        ({"env": [lambda: None]}, EnvBuildError, "function 0 made NoneType"),
        ({"env": [CountingEnv(), CountingEnv(observation="image")]}, EnvBuildError, "environment 1 has observations"),
        ({"buffer": []}, ValueError, "list is not a buffer"),
        ({"exploration_noise": np.True_}, PolicyError, "exploration_noise is True, and only policies of Tianshou's"),
    ],
)
def test_what_a_collector_cannot_have_is_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    env = Options()
    with pytest.raises(error, match=words):
        Collector(step_mod_5, **{"env": env, **given})
    assert "env" in given or env.is_closed


def test_attributes_are_those_of_what_was_given() -> None:
    envs, buffer = [CountingEnv() for _ in range(3)], LatestBatch()
    with Collector[CollectStats](step_mod_5, envs, buffer, exploration_noise=0) as collector:
        assert (collector.policy, collector.env, collector.buffer) == (step_mod_5, envs, buffer)
        assert (collector.env_num, collector.action_space, collector.is_closed) == (3, envs[0].action_space, False)
    assert collector.is_closed
    collector.close()
    with pytest.raises(ValueError, match="the collector is closed"):
        collector.collect(n_step=3)


def test_statistics_are_the_same_without_a_buffer() -> None:
    transformed: list[TensorDict] = []
    transforms = [lambda batch: transformed.append(batch) or batch]
    without, stored = (make(3, buffer=buffer, transforms=transforms) for buffer in (None, LatestBatch()))
    for asked in ({"n_step": 7}, {"n_episode": 4}):
        ours = without.collect(**asked)
        assert transformed == []
        theirs = stored.collect(**asked)
        assert len(transformed) == 1
        transformed.clear()
        assert (ours.returns.tolist(), ours.lens.tolist()) == (theirs.returns.tolist(), theirs.lens.tolist())
    without.reset()
    assert without.buffer is None


def test_torchs_seed_fixes_what_was_given_no_seed() -> None:
    def actions(seed: int) -> list[int]:
        torch.manual_seed(seed)
        collector = Collector(None, [CountingEnv() for _ in range(2)], LatestBatch())
        collector.collect(n_step=40)
        return latest(collector)["action"].flatten().tolist()

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)
