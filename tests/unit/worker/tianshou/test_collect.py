"""The Tianshou layer, without Tianshou: counts, values, resets, hooks, bad requests."""

import ast
import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from cormorant_postproc import FrameStack, MultiStep, RewardClip
from cormorant_testing.check import Checker
from cormorant_testing.coin import LONG, tossers
from cormorant_testing.envs import CountingEnv, Oracle
from cormorant_testing.policies import Counter
from cormorant_worker.collect.seeding import SeedPath
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvError, PolicyError
from cormorant_worker.tianshou import AsyncCollector, Collector, CollectStats, LatestBatch

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


def oracles(num_envs: int, **options: Any) -> list[Oracle]:
    return [Oracle(seed=seed, **options) for seed in SeedPath(job_seed=SEED, index=0).env_seeds(num_envs)]


@given(num_envs=st.integers(1, 4), lengths=LENGTHS, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
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


@given(num_envs=st.integers(1, 4), lengths=LENGTHS, more=st.lists(st.integers(0, 9), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_n_episode_is_exact_and_every_environment_has_its_share(
    num_envs: int, lengths: list[int], more: list[int]
) -> None:
    collector = make(num_envs, env={"lengths": tuple(lengths)})
    played = 0
    for extra in more:
        count = num_envs + extra
        stats = collector.collect(n_episode=count)
        batch = latest(collector)
        assert stats.n_collected_episodes == len(stats.returns) == len(stats.lens) == count
        assert stats.n_collected_steps == len(collector.buffer) == stats.lens.sum()
        assert stats.n_skipped_steps == 0
        shares = [count // num_envs + (b < count % num_envs) for b in range(num_envs)]
        assert batch["next", "done"].squeeze(-1).sum(1).tolist() == shares
        # Everything that was played is stored: no step in vain, no reset in vain, within a call or between calls.
        assert all(row["observation"][0, 2] == 0 for row in batch)
        played += shares[0]
        episodes = batch["observation"][0, :, 1][batch["next", "done"][0, :, 0]]
        assert int(episodes[-1]) == played - 1


def test_returns_and_lengths_are_those_of_whole_episodes_over_several_calls() -> None:
    collector = make(2, env={"lengths": (5,)})
    assert collector.collect(n_step=6).n_collected_episodes == 0
    stats = collector.collect(n_step=6)
    assert stats.lens.tolist() == [5, 5]
    assert stats.returns.tolist() == [15.0, 15.0]
    assert (stats.lens_stat.mean, stats.lens_stat.std, stats.lens_stat.min, stats.lens_stat.max) == (5, 0, 5, 5)
    assert stats.collect_time > 0
    assert stats.collect_speed == pytest.approx(6 / stats.collect_time)
    assert collector.collect_time >= stats.collect_time


def test_percentiles_are_numpys() -> None:
    stats = make(3, env={"lengths": (1, 2, 3, 5, 8, 13)}).collect(n_episode=50)
    found = stats.returns_stat
    expected = np.percentile(stats.returns, (5, 25, 50, 75, 95))
    assert [found.p5, found.p25, found.median, found.p75, found.p95] == pytest.approx(expected.tolist())
    assert (found.mean, found.std) == pytest.approx((stats.returns.mean(), stats.returns.std()))
    assert make().collect(n_step=1).returns_stat is None


def test_statistics_are_summarised_as_they_are_made() -> None:
    stats = CollectStats.with_autogenerated_stats(np.array([1.0, 3.0]), np.array([2, 6]), n_collected_steps=8)
    assert stats.returns_stat is not None
    assert (stats.returns_stat.mean, stats.lens_stat.max, stats.n_collected_steps) == (2.0, 6.0, 8)
    empty = CollectStats.with_autogenerated_stats(np.empty(0), np.empty(0))
    assert (empty.returns_stat, empty.lens_stat, empty.lens.dtype) == (None, None, np.int64)


def test_statistics_are_printed_as_tianshou_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    stats = CollectStats.with_autogenerated_stats(np.array([1.0, 3.0]), np.array([2, 6]), n_collected_steps=8)
    text = stats.pprints_asdict(exclude_fields=["returns", "lens", "lens_stat"], indent=2)
    head, line, *rest = text.splitlines()
    assert (head, line) == ("CollectStats", "-" * 40)
    values = ast.literal_eval("".join(rest))
    assert values["n_collected_steps"] == 8
    assert values["returns_stat"]["median"] == 2.0
    assert not {"returns", "lens", "lens_stat"} & set(values)
    assert stats.returns_stat is not None
    stats.returns_stat.pprint_asdict()
    assert capsys.readouterr().out == stats.returns_stat.pprints_asdict() + "\n"


def test_short_episodes_are_not_favoured() -> None:
    # Tianshou's own collector takes three quarters short ones here: tests/peers shows it.
    collector = Collector(None, tossers(), seed=3)
    lengths = np.concatenate([collector.collect(n_episode=40).lens for _ in range(20)])
    share = (lengths == 1).mean()
    assert set(lengths) == {1, LONG}
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(len(lengths))


def test_hidden_states_are_reset_at_ends_of_episodes_and_carried_over_calls() -> None:
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


def test_a_policy_of_none_acts_at_random() -> None:
    collector = Collector(None, CountingEnv(), LatestBatch(), seed=1)
    collector.collect(n_step=100)
    assert set(latest(collector)["action"].flatten().tolist()) == {0, 1, 2, 3, 4}


def test_noise_is_added_to_what_is_sent_and_stored() -> None:
    def act(observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(observation), 2)

    def noise(action: np.ndarray, observation: np.ndarray) -> np.ndarray:
        return action + 1 + observation[:, :1] * 0

    collector = make(2, policy=act, env={"action": "box"}, exploration_noise=noise)
    collector.collect(n_step=6)
    batch = latest(collector)
    assert (batch["action"] == 1).all()
    assert (batch["next", "observation"][..., 3] == 3).all()  # 1 * 1 + 2 * 1: the environment has seen it
    with pytest.raises(PolicyError, match="has no add_exploration_noise"):
        make(2, policy=act, env={"action": "box"}, exploration_noise=True)


class Learning(torch.nn.Module):
    """Remembers whether gradients were on, and acts with what has some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.grads: list[bool] = []

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.grads.append(torch.is_grad_enabled())
        return (observation[:, :2] * 0 + self.weight).float()


def test_no_grad_false_calls_the_policy_with_the_gradient_on() -> None:
    policy = Learning()
    collector = make(2, policy=policy, env={"action": "box"})
    policy.grads.clear()
    collector.collect(n_step=4)
    collector.collect(n_step=4, no_grad=False)
    collector.collect(n_step=4)
    assert policy.grads == [False] * 2 + [True] * 2 + [False] * 2
    assert not latest(collector)["action"].requires_grad


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


def test_reset_arguments_reach_every_reset_and_a_seed_is_spread() -> None:
    envs = [Options(lengths=2) for _ in range(2)]
    collector = Collector(step_mod_5, envs, LatestBatch(), seed=SEED)
    collector.collect(n_step=8, reset_before_collect=True, gym_reset_kwargs={"seed": 5, "options": {"level": 3}})
    collector.collect(n_step=4)
    spread = SeedPath(job_seed=5, index=0).env_seeds(2)
    for env, seed in zip(envs, spread, strict=True):
        first, *rest = env.resets[1:]
        assert first == (seed, {"level": 3})
        assert rest == [(None, {"level": 3})] * 2 + [(None, None)]
    before = latest(collector)["observation"].clone()
    collector.reset(gym_reset_kwargs={"seed": 5})
    collector.collect(n_step=8)
    collector.collect(n_step=4)
    assert torch.equal(latest(collector)["observation"], before)  # a seed reproduces


@pytest.mark.parametrize("asked", [{"n_step": 4}, {"n_episode": 2}])
def test_a_seed_that_no_reset_would_take_is_refused(asked: dict[str, int]) -> None:
    envs = [Options(lengths=2) for _ in range(2)]
    collector = Collector(step_mod_5, envs, LatestBatch(), seed=SEED)
    with pytest.raises(ValueError, match="seed 5 and nothing is reset when collecting begins; add reset_before_"):
        collector.collect(**asked, gym_reset_kwargs={"seed": 5})
    assert [len(env.resets) for env in envs] == [1, 1]


def test_reset_empties_and_forgets_what_it_is_told_to() -> None:
    collector = make(2, env={"lengths": 4})
    collector.collect(n_step=6)
    collector.reset(reset_buffer=False)
    assert len(collector.buffer) == 6
    assert (collector.collect_step, collector.collect_episode, collector.collect_time) == (0, 0, 0.0)
    stats = collector.collect(n_step=8)
    assert stats.lens.tolist() == [4, 4]  # what was open before the reset counts for nothing
    collector.reset(reset_stats=False)
    assert collector.collect_step == 8
    assert len(collector.buffer) == 0


def test_rendering_follows_every_vector_step_and_sleeps() -> None:
    envs = [Options() for _ in range(2)]
    collector = Collector(step_mod_5, envs, seed=SEED)
    began = time.monotonic()
    collector.collect(n_step=6, render=0.02)
    assert time.monotonic() - began >= 0.06
    assert envs[0].rendered == [1, 2, 3]
    collector.collect(n_step=6)
    collector.collect(n_step=6, render=0.0)
    assert len(envs[0].rendered) == 3


def test_step_hooks_see_every_vector_step_and_may_change_it() -> None:
    seen = []

    def hook(actions: TensorDict, rollout: TensorDict) -> None:
        seen.append((len(rollout), rollout["obs"][:, 2].tolist(), actions["act"].tolist()))
        rollout["rew"].mul_(10)

    collector = make(2, env={"lengths": 9}, on_step_hook=hook)
    collector.collect(n_step=5)
    assert seen == [(2, [0.0, 0.0], [0, 0]), (2, [1.0, 1.0], [1, 1]), (1, [2.0], [2])]
    assert latest(collector)["next", "reward"][0].flatten().tolist() == [10.0, 20.0, 30.0]


def test_fields_that_step_hooks_add_or_reassign_are_stored() -> None:
    def hook(actions: TensorDict, rollout: TensorDict) -> None:
        rollout["rew"] = rollout["rew"] * 10
        rollout["step"] = rollout["obs"][:, 2].long()

    collector = make(2, env={"lengths": 9}, on_step_hook=hook)
    collector.collect(n_step=5)
    assert latest(collector)["next", "reward"][0].flatten().tolist() == [10.0, 20.0, 30.0]
    assert latest(collector)["hooked", "step"].tolist() == [[0, 1, 2], [0, 1, 0]]


def delete_obs(actions: TensorDict, rollout: TensorDict) -> None:
    del rollout["obs"]


def add_one_number(actions: TensorDict, rollout: TensorDict) -> None:
    rollout.set_non_tensor("note", "text")


@pytest.mark.parametrize(
    ("hook", "words"), [(delete_obs, "on_step_hook removed obs"), (add_one_number, "on_step_hook gave note as str")]
)
def test_what_step_hooks_do_and_cannot_be_stored_is_refused(hook: Any, words: str) -> None:
    collector = make(2, env={"lengths": 9}, on_step_hook=hook)
    with pytest.raises(ValueError, match=words):
        collector.collect(n_step=4)


def test_episode_hooks_see_episodes_whose_fields_were_added_midway() -> None:
    lengths: list[int] = []
    collector = make(2, env={"lengths": (5,)}, on_episode_done_hook=lambda episode: lengths.append(len(episode)))
    collector.collect(n_step=4)
    collector.set_on_step_hook(lambda _, rollout: rollout.set("one", torch.ones(len(rollout))))
    collector.collect(n_step=8)
    assert lengths == [5, 5]


def test_collectors_are_subscripted_as_tianshous_are() -> None:
    envs = [CountingEnv(lengths=(2, 5, 3))]
    collector = Collector[CollectStats](step_mod_5, envs, collect_stats_class=CollectStats)
    assert isinstance(collector, Collector)
    assert isinstance(collector.collect(n_step=3), CollectStats)


def test_a_stats_class_with_updates_of_its_own_is_refused() -> None:
    class Own(CollectStats):
        def update_at_step_batch(self, batch: Any) -> None: ...

    with pytest.raises(ValueError, match="collect_stats_class Own overrides update_at_step_batch"):
        make(collect_stats_class=Own)
    with pytest.raises(ValueError, match="collect_stats_class dict is no CollectStats"):
        make(collect_stats_class=dict)


def test_fewer_episodes_than_environments_are_played_by_the_first() -> None:
    collector = make(3, env={"lengths": (4,)})
    assert collector.collect(n_episode=2).lens.tolist() == [4, 4]
    assert latest(collector)["collector", "mask"].sum(1).tolist() == [4, 4, 0]


def test_a_policy_is_tried_with_as_many_rows_as_there_are() -> None:
    rows = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        rows.append(len(observation))
        return torch.arange(3)[: len(observation)]

    make(3, policy=policy).collect(n_step=6)
    assert rows == [3, 3, 3]


def test_episode_hooks_see_whole_episodes_and_add_to_them() -> None:
    def to_go(episode: TensorDict) -> dict[str, np.ndarray]:
        return {"to_go": episode["rew"].flip(0).cumsum(0).flip(0).numpy()}

    collector = make(2, env={"lengths": (3,)}, on_episode_done_hook=to_go)
    collector.collect(n_episode=3)
    added = latest(collector)["hooked", "to_go"]
    assert added[0].tolist() == pytest.approx([6.0, 5.0, 3.0, 6.003, 5.002, 3.001])
    with pytest.raises(ValueError, match=r"returned \['to_go'\] with n_step"):
        collector.collect(n_step=20)


def test_episode_hooks_see_episodes_that_began_in_earlier_calls() -> None:
    lengths: list[int] = []
    collector = make(2, env={"lengths": (5,)}, on_episode_done_hook=lambda episode: lengths.append(len(episode)))
    for _ in range(4):
        collector.collect(n_step=6)
    assert lengths == [5, 5, 5, 5]


def test_transforms_run_before_storing_and_leave_the_statistics_alone() -> None:
    transforms = [RewardClip(0, 1), FrameStack(2), MultiStep(1.0, 2)]
    collector = make(2, env={"lengths": (4,)}, transforms=transforms)
    stats = collector.collect(n_step=8)
    assert stats.returns.tolist() == [10.0, 10.0]
    batch = latest(collector)
    assert batch["next", "reward"][0].flatten().tolist() == [2.0, 2.0, 2.0, 1.0]
    assert batch["observation"][0, :, :, 2].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]


def test_nan_is_refused_before_anything_is_stored() -> None:
    collector = make(2, transforms=[with_nan], raise_on_nan_in_buffer=True)
    with pytest.raises(EnvCrashed, match=r"next\.reward has 1 NaN in 6 values; nothing was stored"):
        collector.collect(n_step=6)
    assert len(collector.buffer) == 0
    unconcerned = make(2, transforms=[with_nan])
    unconcerned.collect(n_step=6)
    assert int(latest(unconcerned)["next", "reward"].isnan().sum()) == 1


def with_nan(batch: TensorDict) -> TensorDict:
    batch["next", "reward"][0, 1] = torch.nan
    return batch


def test_hooks_can_be_exchanged() -> None:
    steps: list[Any] = []
    lengths: list[int] = []
    collector = make(2, env={"lengths": (3,)})
    assert collector.get_on_step_hook() is collector.get_on_episode_done_hook() is None
    collector.collect(n_step=6)
    collector.set_on_step_hook(lambda *seen: steps.append(seen))
    collector.set_on_episode_done_hook(lambda episode: lengths.append(len(episode)))
    collector.collect(n_step=6)
    assert (len(steps), lengths) == (3, [3, 3])
    collector.set_on_step_hook(None)
    collector.set_on_episode_done_hook(None)
    collector.collect(n_step=6)
    assert (len(steps), lengths) == (3, [3, 3])


def test_an_environment_that_raises_is_named() -> None:
    collector = make(2, env={"failures": [{"how": "raise", "step": 3}]})
    with pytest.raises(ValueError, match="told to fail") as raised:
        collector.collect(n_step=20)
    assert raised.value.__notes__ == ["in environment 0, after 2 completed steps"]


class TooSmall(LatestBatch):
    class _Storage:
        max_size, ndim = 10, 2

    _storage = _Storage()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, "n_step None and n_episode None: give exactly one"),
        ({"n_step": 3, "n_episode": 3}, "n_step 3 and n_episode 3: give exactly one"),
        ({"n_step": 0}, "n_step 0 is not a number of them"),
        ({"n_step": -5}, "n_step -5"),
        ({"n_step": 2.5}, "n_step 2.5"),
        ({"n_step": True}, "n_step True"),
        ({"n_step": 3, "render": -1.0}, "render -1.0 is no time to sleep"),
        ({"n_step": 12}, "the buffer holds 10 frames and n_step is 12"),
        ({"n_step": 4}, "n_step 4 is not a multiple of the 3 environments"),
        ({"n_episode": 11}, "the buffer holds 10 frames and n_episode 11 has at least as many"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_stepped(request_: dict[str, Any], words: str) -> None:
    collector = make(3, buffer=TooSmall())
    with pytest.raises(ValueError, match=words):
        collector.collect(**request_)
    collector.collect(n_step=3)
    assert not latest(collector)["observation"][:, :, 2].any()  # the very first frames


def test_a_storage_of_two_dimensions_takes_whole_rows_and_no_episodes() -> None:
    class Wide(TooSmall):
        keeps_time = False

    collector = make(3, buffer=Wide())
    with pytest.raises(ValueError, match="two dimensions, and n_episode 3 makes rows of different lengths"):
        collector.collect(n_episode=3)
    collector.collect(n_step=9)
    assert latest(collector).shape == (3, 3)
    assert latest(collector)["observation"][0, :, 2].tolist() == [0, 1, 0]  # nothing was stepped before


def test_what_is_no_environment_no_buffer_or_no_equal_is_refused() -> None:
    with pytest.raises(EnvError, match="environments are str"):
        Collector(step_mod_5, "CartPole-v1")
    with pytest.raises(EnvError, match="SyncVectorEnv resets on its own"):
        Collector(step_mod_5, gymnasium.vector.SyncVectorEnv([CountingEnv]))
    with pytest.raises(EnvBuildError, match="function 0 made NoneType"):
        Collector(step_mod_5, [lambda: None])
    with pytest.raises(EnvBuildError, match="environment 1 has observations"):
        Collector(step_mod_5, [CountingEnv(), CountingEnv(observation="image")])
    with pytest.raises(ValueError, match="list is no buffer"):
        Collector(step_mod_5, CountingEnv(), [])
    collector = make()
    collector.close()
    with pytest.raises(ValueError, match="the collector is closed"):
        collector.collect(n_step=3)


def test_attributes_are_those_of_what_was_given() -> None:
    envs, buffer = [CountingEnv() for _ in range(3)], LatestBatch()
    with Collector(step_mod_5, envs, buffer) as collector:
        assert (collector.policy, collector.env, collector.buffer) == (step_mod_5, envs, buffer)
        assert (collector.env_num, collector.action_space, collector.is_closed) == (3, envs[0].action_space, False)
    assert collector.is_closed
    collector.close()


def test_without_a_buffer_no_batch_is_made_and_the_statistics_are_the_same() -> None:
    made: list[TensorDict] = []

    def remember(batch: TensorDict) -> TensorDict:
        made.append(batch)
        return batch

    without, stored = (make(3, buffer=buffer, transforms=[remember]) for buffer in (None, LatestBatch()))
    for asked in ({"n_step": 7}, {"n_episode": 4}):
        ours = without.collect(**asked)
        assert made == []
        theirs = stored.collect(**asked)
        assert len(made) == 1
        made.clear()
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


def test_environments_in_lockstep_may_use_the_asynchronous_collector() -> None:
    with AsyncCollector(step_mod_5, CountingEnv(), LatestBatch(), seed=SEED) as collector:
        assert collector.collect(n_episode=2).n_collected_episodes == 2
