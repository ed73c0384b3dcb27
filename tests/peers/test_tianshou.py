"""Against the real Tianshou: its policies, its buffers frame by frame, its vector environments, its trainer.

`make test-peers` makes the environment that has it; elsewhere these tests are skipped.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("tianshou", reason="Tianshou is not installed; `make test-peers` runs these tests")

from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.data import Collector as Theirs
from tianshou.data import HERVectorReplayBuffer, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer
from tianshou.data.collector import BaseCollector, EpisodeRolloutHookMCReturn
from tianshou.env import ContinuousToDiscrete, DummyVectorEnv, SubprocVectorEnv, VectorEnvNormObs
from tianshou.env.venv_wrappers import VectorEnvWrapper

from cormorant_compat.tianshou import AsyncCollector, Collector, LatestBatch
from cormorant_testing.envs import CountingEnv
from cormorant_worker.errors import EnvError

pytestmark = pytest.mark.filterwarnings("ignore")

BOX = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)


class Scripted(nn.Module):
    """Acts step % 5, surely; with a state: the number of steps since the episode began."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
        step = torch.as_tensor(np.asarray(obs))[:, 2].long() % 5
        if self.recurrent:
            before = torch.zeros(len(step), 1) if state is None else state["count"]
            state = {"count": before + 1}
        return nn.functional.one_hot(step, 5).float() * 1e4, state


class Zeros(nn.Module):
    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
        return torch.zeros(len(obs), 2), state


def discrete_policy(actor: nn.Module | None = None) -> DiscreteActorPolicy:
    return DiscreteActorPolicy(
        actor=actor or Scripted(), action_space=gymnasium.spaces.Discrete(5), observation_space=BOX
    )


def counting(num_envs: int, **options: Any) -> DummyVectorEnv:
    return DummyVectorEnv([lambda: CountingEnv(**options) for _ in range(num_envs)])


def contents(buffer: Any) -> dict[str, Any]:
    """Everything that a buffer holds, and where it stands."""
    subs = list(getattr(buffer, "buffers", [buffer]))
    found = {
        "last_index": buffer.last_index.tolist(),
        "length": len(buffer),
        "subs": [
            (s.last_index.tolist(), s._size, s._insertion_idx, s._ep_len, s._ep_start_idx, float(s._ep_return))
            for s in subs
        ],
    }
    at = buffer.sample_indices(0)
    found["indices"] = at.tolist()
    for key in ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next"):
        if key in buffer._meta.get_keys():
            found[key] = buffer._meta[key][at].tolist()
    found["next"], found["prev"] = buffer.next(at).tolist(), buffer.prev(at).tolist()
    found["unfinished"] = buffer.unfinished_index().tolist()
    return found


BUFFERS = {
    "plain": (1, lambda: ReplayBuffer(20)),
    "vector": (3, lambda: VectorReplayBuffer(60, 3)),
    "derived-next": (3, lambda: VectorReplayBuffer(60, 3, ignore_obs_next=True)),
    "prioritized": (3, lambda: PrioritizedVectorReplayBuffer(60, 3, alpha=0.6, beta=0.4)),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_hold_bit_for_bit_what_tianshous_collector_stores(kind: str) -> None:
    num_envs, make = BUFFERS[kind]
    ours, theirs = make(), make()
    options = {"lengths": (2, 5, 3), "ends": "alternate"}
    theirs_collector = Theirs(discrete_policy(), counting(num_envs, **options), theirs)
    theirs_collector.reset(gym_reset_kwargs={"seed": 11})
    our_collector = Collector(discrete_policy(), counting(num_envs, **options), ours)
    our_collector._envs.reset_with({"seed": 11})  # all environments the same seed, as Tianshou's reset gives them
    our_collector.reset_env()
    our_collector._envs.reset_with({})
    for rows in (1, 4, 1, 7, 20, 13):  # past the end of the buffers, too
        expected = theirs_collector.collect(n_step=num_envs * rows)
        found = our_collector.collect(n_step=num_envs * rows)
        assert contents(ours) == contents(theirs)
        assert sorted(found.returns) == sorted(expected.returns)
        assert sorted(found.lens) == sorted(expected.lens)
    if kind == "prioritized":
        assert [ours.weight[i] for i in range(60)] == [theirs.weight[i] for i in range(60)]
    sampled, _ = ours.sample(8)
    assert sampled.obs.shape == (8, 4)
    assert not ours.hasnull()


def test_uneven_counts_and_episodes_land_in_their_own_sub_buffers() -> None:
    buffer = VectorReplayBuffer(300, 3)
    collector = Collector(discrete_policy(), counting(3, lengths=(2, 5, 3)), buffer)
    assert collector.collect(n_step=7).n_collected_steps == len(buffer) == 7
    assert buffer._lengths.tolist() == [3, 2, 2]
    collector.reset_buffer()
    stats = collector.collect(n_episode=10)
    assert stats.n_collected_episodes == int(buffer.done[buffer.sample_indices(0)].sum()) == 10
    assert len(buffer) == stats.lens.sum()
    ids = buffer.info.env_id[buffer.sample_indices(0)].tolist()
    assert ids == sorted(ids)


def test_other_buffers_get_a_row_at_a_time() -> None:
    options = {"compute_reward_fn": lambda a, b: np.zeros(len(a)), "horizon": 5, "future_k": 1.0}
    buffer = HERVectorReplayBuffer(60, buffer_num=2, **options)
    Collector(discrete_policy(), counting(2), buffer).collect(n_step=20)
    assert len(buffer) == 20


def test_open_episode_statistics_can_outlive_a_buffer_reset() -> None:
    for keeps in (True, False):
        buffer = VectorReplayBuffer(60, 2)
        collector = Collector(discrete_policy(), counting(2, lengths=9), buffer)
        collector.collect(n_step=8)
        collector.reset_buffer(keep_statistics=keeps)
        assert len(buffer) == 0
        collector.collect(n_step=2)
        assert [sub._ep_len for sub in buffer.buffers] == [5 if keeps else 1] * 2


def test_a_buffer_that_is_too_small_or_too_narrow_is_refused() -> None:
    with pytest.raises(ValueError, match="VectorReplayBuffer has room for 2 environments and there are 3"):
        Collector(discrete_policy(), counting(3), VectorReplayBuffer(60, 2))
    collector = Collector(discrete_policy(), counting(3), VectorReplayBuffer(30, 3))
    for request in ({"n_step": 31}, {"n_episode": 31}):
        with pytest.raises(ValueError, match=r"holds 30 frames of 3 environments, and n_\w+ 31 brings at least 31"):
            collector.collect(**request)


def test_recurrent_policies_carry_their_state_and_lose_it_at_ends() -> None:
    # Tianshou 2.0.1 never resets a torch state: its count goes on over episodes.
    buffer = VectorReplayBuffer(300, 3)
    collector = Collector(discrete_policy(Scripted(recurrent=True)), counting(3, lengths=(2, 5, 3)), buffer)
    collector.collect(n_step=21)
    collector.collect(n_step=30)
    at = buffer.sample_indices(0)
    assert buffer.policy.hidden_state.count[at].flatten().tolist() == (buffer.obs[at][:, 2] + 1).tolist()


class Gaussian(nn.Module):
    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Any, Any]:
        n = len(obs)
        return (torch.full((n, 2), 0.25), torch.full((n, 2), 1e-6)), state


def test_what_was_decided_is_stored_and_what_is_mapped_is_sent() -> None:
    space = gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float32)
    policy = ProbabilisticActorPolicy(
        actor=Gaussian(),
        dist_fn=lambda pair: torch.distributions.Independent(torch.distributions.Normal(*pair), 1),
        action_space=space,
        observation_space=BOX,
        action_scaling=True,
        action_bound_method="clip",
    )
    buffer = VectorReplayBuffer(100, 2)
    collector = Collector(policy, counting(2, action="box"), buffer)
    collector.collect(n_step=10)
    at = buffer.sample_indices(0)
    np.testing.assert_allclose(buffer.act[at], 0.25, atol=1e-4)
    np.testing.assert_allclose(buffer.obs_next[at][:, 3], 25.0 * 1 + 25.0 * 2, rtol=1e-3)
    collector.reset_buffer()
    collector.collect(n_step=40, random=True)
    at = buffer.sample_indices(0)
    echoed = buffer.act[at] @ np.array([1.0, 2.0]) * 100
    np.testing.assert_allclose(buffer.obs_next[at][:, 3], echoed, rtol=1e-3, atol=1e-2)
    latest = LatestBatch()
    Collector(policy, counting(2, action="box"), latest).collect(n_step=4)
    np.testing.assert_allclose(latest.tensordict["env_action"], 25.0, rtol=1e-3)
    np.testing.assert_allclose(latest.tensordict["action"], 0.25, atol=1e-4)


def test_a_policys_own_noise_is_added() -> None:
    policy = discrete_policy()
    policy.add_exploration_noise = lambda act, batch: (act + 1) % 5
    buffer = VectorReplayBuffer(100, 2)
    Collector(policy, counting(2), buffer, exploration_noise=True).collect(n_step=10)
    at = buffer.sample_indices(0)
    assert buffer.act[at].tolist() == ((buffer.obs[at][:, 2] + 1) % 5).tolist()


def test_tianshous_hooks_work_and_their_values_are_stored() -> None:
    buffer = VectorReplayBuffer(300, 2)
    seen: list[int] = []
    collector = Collector(
        discrete_policy(),
        counting(2, lengths=(3,)),
        buffer,
        on_episode_done_hook=EpisodeRolloutHookMCReturn(gamma=1.0),
        on_step_hook=lambda actions, rollout: seen.append(len(rollout)),
    )
    collector.collect(n_episode=4)
    collector.collect(n_episode=2)
    at = buffer.sample_indices(0)
    to_go = buffer._meta.mc_return_to_go[at]
    assert to_go[:3].tolist() == pytest.approx([6.0, 5.0, 3.0])
    assert not np.isnan(to_go).any()
    assert seen == [2] * 9


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vector_environments_in_processes(kind: str) -> None:
    made = [lambda: CountingEnv(lengths=(2, 5, 3)) for _ in range(4)]
    env = SubprocVectorEnv(made, wait_num=2) if kind == "async" else SubprocVectorEnv(made)
    with (AsyncCollector if kind == "async" else Collector)(discrete_policy(), env, LatestBatch()) as collector:
        assert isinstance(collector, BaseCollector)
        for size in (10, 33):
            assert collector.collect(n_step=size).n_collected_steps == len(collector.buffer) == size
        stats = collector.collect(n_episode=9)
        batch = collector.buffer.tensordict
        assert stats.n_collected_episodes == int(batch["next", "done"].sum()) == 9
        assert (batch["action"] == batch["observation"][..., 2] % 5).all()
        collector.reset_env()
        collector.collect(n_step=4)
        assert not collector.buffer.tensordict["observation"][..., 2].any()


@pytest.mark.parametrize("wrapped", [VectorEnvNormObs, VectorEnvWrapper])
def test_wrappers_of_vector_environments_are_collected(wrapped: Any) -> None:
    def buffer_of(kind: Any) -> Any:
        env = wrapped(counting(3, lengths=(2, 5, 3)))
        buffer = VectorReplayBuffer(300, 3)
        collector = kind(discrete_policy(Zeros()), env, buffer)
        if kind is Theirs:
            collector.reset()
        collector.collect(n_step=30)
        collector.close()
        assert env.venv.is_closed
        return buffer

    ours, theirs = buffer_of(Collector), buffer_of(Theirs)
    np.testing.assert_array_equal(ours.done, theirs.done)
    # Seeds differ, and with them what the first column shows; how the steps were normalized does not.
    np.testing.assert_allclose(ours.obs[:, 2], theirs.obs[:, 2], rtol=1e-5)


@pytest.mark.parametrize("venv", [DummyVectorEnv, SubprocVectorEnv])
def test_vector_environments_are_as_their_wrappers_show_them(venv: Any) -> None:
    def wrapped() -> Any:
        shown = gymnasium.wrappers.ReshapeObservation(gymnasium.make("Pendulum-v1"), (1, 3))
        return ContinuousToDiscrete(shown, 40)

    with Collector(None, venv([wrapped] * 2), VectorReplayBuffer(20, 2)) as collector:
        collector.collect(n_step=8)
        assert collector.action_space == gymnasium.spaces.MultiDiscrete([40])
        assert (collector.buffer.obs.shape[1:], collector.buffer.act.dtype) == ((1, 3), np.int64)


@pytest.mark.parametrize("given", [lambda make: DummyVectorEnv([make]), lambda make: make()])
def test_rewards_of_several_agents_are_refused(given: Any) -> None:
    env = given(lambda: gymnasium.wrappers.TransformReward(CountingEnv(), lambda reward: [reward] * 2))
    with Collector(discrete_policy(), env) as collector, pytest.raises(EnvError, match="; return one number"):
        collector.collect(n_step=2)


def test_without_a_buffer_there_is_one_as_tianshou_makes_it() -> None:
    options = {"lengths": (2, 5, 3), "ends": "alternate"}
    theirs = Theirs(discrete_policy(), counting(3, **options)).buffer
    ours, given = (
        Collector(discrete_policy(), counting(3, **options), buffer, seed=5)
        for buffer in (None, VectorReplayBuffer(theirs.maxsize, 3))
    )
    assert (type(ours.buffer), ours.buffer.maxsize, ours.buffer.buffer_num) == (type(theirs), 30_000, 3)
    # Episodes go into it block by block, into a buffer of the script's when all are whole.
    for request in ({"n_step": 12}, {"n_episode": 200}):
        assert ours.collect(**request).returns.tolist() == given.collect(**request).returns.tolist()
        assert contents(ours.buffer) == contents(given.buffer)
    # More than it holds: the newest frames stay, as in Tianshou.
    assert ours.collect(n_step=3 * 10_001).n_collected_steps == 30_003
    assert len(ours.buffer) == 30_000


@pytest.mark.parametrize("venv", [DummyVectorEnv, VectorEnvNormObs, list])
def test_info_in_buffers_is_what_environments_say(venv: Any) -> None:
    makers = [lambda: CountingEnv(lengths=(3, 4))] * 2
    envs = makers if venv is list else DummyVectorEnv(makers)
    buffer = VectorReplayBuffer(40, 2)
    collector = Collector(
        discrete_policy(), venv(envs) if venv is VectorEnvNormObs else envs, buffer, info=["step", "nested.echo"]
    )
    collector.collect(n_step=20)
    sampled, _ = buffer.sample(0)
    assert sorted(sampled.info.get_keys()) == ["env_id", "nested", "step"]
    if venv is not VectorEnvNormObs:
        assert sampled.info["step"].tolist() == sampled.obs_next[:, 2].tolist()
    assert sampled.info.nested.echo.tolist() == sampled.act.tolist()


def trained(collector: Any) -> tuple[list[Any], dict[str, Any]]:
    """The acrobot example, shortened: contents of the buffer after each collect, and the weights at the end."""
    from tianshou.algorithm import DQN
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.trainer import OffPolicyTrainerParams
    from tianshou.utils.net.common import Net

    torch.manual_seed(0)
    several = [lambda: gymnasium.make("Acrobot-v1", max_episode_steps=37)] * 4
    train, test = DummyVectorEnv(several), DummyVectorEnv(several)
    net = Net(state_shape=6, action_shape=3, hidden_sizes=[32], dueling_param=({"hidden_sizes": [32]},) * 2)
    actions = gymnasium.spaces.Discrete(3)
    policy = DiscreteQLearningPolicy(model=net, action_space=actions, eps_training=0.5, eps_inference=0.0)
    optim = AdamOptimizerFactory(lr=1e-3)
    algorithm = DQN(policy=policy, optim=optim, gamma=0.95, n_step_return_horizon=3, target_update_freq=32)
    buffer = VectorReplayBuffer(400, 4)
    training, testing = collector(algorithm, train, buffer, exploration_noise=True), collector(algorithm, test)
    # Building a collector of ours draws random numbers for its dry run.
    np.random.seed(1)
    for envs in (train, test):
        envs.seed(2)
    training.reset()
    found = []

    def look(epoch: int, step: int) -> None:
        policy.set_eps_training(0.5 - step / 4000)
        found.append(contents(buffer))

    training.collect(n_step=80)
    params = OffPolicyTrainerParams(
        training_collector=training, test_collector=testing, max_epochs=2, epoch_num_steps=600, batch_size=32,
        collection_step_num_env_steps=40, test_step_num_episodes=4, update_step_num_gradient_steps_per_sample=0.1,
        training_fn=look, test_in_training=True, stop_fn=lambda score: score > 0,
    )  # fmt: skip
    found.append(algorithm.run_training(params).best_reward)
    return found, {name: value.tolist() for name, value in policy.state_dict().items()}


@pytest.mark.slow
def test_training_is_the_same_bit_for_bit_on_either_collector() -> None:
    assert trained(Collector) == trained(Theirs)
