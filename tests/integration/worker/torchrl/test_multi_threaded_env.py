"""MultiThreadedEnv, bit by bit against plain pools. Under TorchRL it is an EnvBase, without it it stands alone: the
same tests hold for both.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import envpool
import numpy as np
import pytest
import torch

from cormorant_compat.torchrl import MultiThreadedEnv, MultiThreadedEnvWrapper
from cormorant_testing.pools import ByHand
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import EnvBuildError, InvalidAction, UnknownEnv

pytestmark = pytest.mark.filterwarnings("ignore")  # gymnasium warns of EnvPool's bounds, TorchRL of other things
needs_torchrl = pytest.mark.skipif(
    find_spec("torchrl") is None, reason="TorchRL is not installed; install it to have its check_env_specs run"
)


def seeds_of(seed: int, n: int) -> list[int]:
    return WorkerPlace(seed=seed, index=0).env_seeds(n)


def cartpole(num_workers: int, seed: Any, **options: Any) -> Any:
    given = {"seed": seed, "batch_size": num_workers}
    options = {"categorical_action_encoding": True, **options}
    return MultiThreadedEnv(num_workers, "CartPole-v1", create_env_kwargs=given, **options)


def following(played: Any, seed: int) -> list[Any]:
    """What plain pools observe before each action of these frames `[B, T]`; what they give for it is in the frames."""
    seen = []
    for row, own in zip(played, seeds_of(seed, len(played)), strict=True):
        by_hand = ByHand("CartPole-v1", own)
        obs = by_hand.reset()
        for frame in row:
            seen.append(obs)
            obs, reward, terminated, truncated = by_hand.step(frame["action"].item())
            np.testing.assert_array_equal(frame["next", "observation"].numpy(), obs)
            assert frame["next", "reward"].item() == reward == 1.0
            flags = frame["next", "terminated"].item(), frame["next", "truncated"].item()
            assert flags == (terminated, truncated)
            assert frame["next", "done"].item() == any(flags)
            if any(flags):
                obs = by_hand.go_on()
    return seen


def test_rollout_matches_plain_pools_without_phantom_frames() -> None:
    played = cartpole(3, 5).rollout(120, break_when_any_done=False)
    assert played.shape == (3, 120)
    assert played["next", "done"].sum() >= 6
    np.testing.assert_array_equal(played["observation"].flatten(0, 1).numpy(), following(played, 5))


def test_rand_step_continues_from_the_current_state() -> None:
    env = cartpole(2, 5)
    played = torch.stack([env.rand_step() for _ in range(60)], 1)
    assert played["next", "done"].sum() >= 2
    following(played, 5)


def check_steps(
    env: Any, by_hand: ByHand, num_steps: int, *, skip: int = 1, actions: Sequence[int] = (1,)
) -> list[int]:
    """An environment gives what a pool gives that is stepped by hand. By step: how often the action was repeated."""
    obs, current, repeated, ends = by_hand.reset(), env.reset(), [], 0
    for _ in range(num_steps):
        np.testing.assert_array_equal(current["observation"][0].numpy(), obs)
        action = actions[ends % len(actions)]
        stepped = env.step(current.set("action", torch.tensor([action])))
        total, over = 0.0, False
        repeated.append(0)
        while repeated[-1] < skip and not over:
            obs, reward, *flags = by_hand.step(action)
            total, over = total + reward, any(flags)
            repeated[-1] += 1
        np.testing.assert_array_equal(stepped["next", "observation"][0].numpy(), obs)
        assert (stepped["next", "reward"].item(), stepped["next", "done"].item()) == (total, over)
        current = stepped["next"].exclude("reward")
        if over:
            ends += 1
            current, obs = env.reset(current.set("_reset", current["done"])), by_hand.go_on()
    assert ends >= 3
    return repeated


def test_a_life_that_ends_an_episode_does_not_restart_the_game() -> None:
    kwargs = {"episodic_life": True, "stack_num": 1, "img_height": 42, "img_width": 42}
    env = MultiThreadedEnv(1, "ALE/Breakout-v5", create_env_kwargs={"seed": [3], **kwargs},
                           categorical_action_encoding=True)  # fmt: skip
    check_steps(env, ByHand("Breakout-v5", 3, **kwargs), 200, actions=[3, 1])


def test_frame_skip_repeats_sums_and_stops_with_the_episode() -> None:
    repeated = check_steps(cartpole(1, [11], frame_skip=3), ByHand("CartPole-v1", 11), 40, skip=3)
    assert set(repeated) > {3}


def test_one_hot_actions_are_the_default_and_mean_the_same() -> None:
    found = []
    for is_categorical in (False, True):
        env = cartpole(2, 1, categorical_action_encoding=is_categorical)
        action = torch.tensor([1, 0]) if is_categorical else torch.tensor([[0, 1], [1, 0]])
        found.append(env.step(env.reset().set("action", action))["next", "observation"])
    assert torch.equal(*found)


def test_seeds_reproduce_and_no_two_environments_share_one() -> None:
    env = MultiThreadedEnv(4, "Pendulum-v1")
    assert env.set_seed(9) != 9
    assert env.set_seed(9, static_seed=True) == 9
    first = env.reset()["observation"]
    assert len({tuple(row.tolist()) for row in first}) == 4
    assert (env.reset()["observation"] != first).any(dim=1).all(), "new episodes everywhere"
    env.set_seed(9)
    assert torch.equal(env.reset()["observation"], first)
    assert torch.equal(cartpole(2, np.int64(5)).reset()["observation"], cartpole(2, 5).reset()["observation"])
    env.set_seed(10)
    assert not torch.equal(env.reset()["observation"], first)


@pytest.mark.parametrize("env_type", ["gymnasium", "gym", "dm"])
def test_pools_of_every_flavor_can_be_wrapped_and_seeded(env_type: str) -> None:
    pool = envpool.make("CartPole-v1", env_type=env_type, num_envs=2, seed=[4, 8], max_episode_steps=5)
    env = MultiThreadedEnvWrapper(pool, categorical_action_encoding=True)
    played = env.rollout(12, break_when_any_done=False)
    by_hand = ByHand("CartPole-v1", 8, max_episode_steps=5)
    np.testing.assert_array_equal(played["observation"][1, 0].numpy(), by_hand.reset())
    assert played["next", "truncated"][:, 4].all()
    assert not played["next", "terminated"].any()
    env.set_seed(2)
    again = env.reset()["observation"]
    np.testing.assert_array_equal(again[0].numpy(), ByHand("CartPole-v1", seeds_of(2, 2)[0]).reset())


def test_dm_control_tasks_keep_the_names_of_their_observations() -> None:
    env = MultiThreadedEnv(2, "CheetahRun-v1", create_env_kwargs={"env_type": "dm", "max_episode_steps": 3})
    played = env.rollout(4, break_when_any_done=False)
    assert played["position"].shape == (2, 4, 8)
    assert played["next", "velocity"].shape == (2, 4, 9)
    assert played["next", "truncated"].squeeze(-1).tolist() == [[False, False, True, False]] * 2
    assert "observation" not in played.keys()  # noqa: SIM118  # a TensorDict, not a dict


@pytest.mark.parametrize(
    ("arguments", "kwargs", "error", "words"),
    [
        ((2, "CartPol-v1"), {}, UnknownEnv, "did you mean CartPole-v1"),
        ((0, "CartPole-v1"), {}, EnvBuildError, "num_workers 0"),
        ((2, "CartPole-v1"), {"frame_skip": 0}, ValueError, "frame_skip 0"),
        ((2, "CartPole-v1"), {"create_env_kwargs": {"lives": 1}}, EnvBuildError, "keyword argument 'lives'"),
        ((2, "CartPole-v1"), {"create_env_kwargs": {"seed": [1]}}, EnvBuildError, "1 seeds for num_workers 2"),
    ],
)
def test_bad_input_is_refused_with_its_values(arguments: Any, kwargs: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        MultiThreadedEnv(*arguments, **kwargs)


def test_what_envpool_would_take_silently_is_refused() -> None:
    with pytest.raises(EnvBuildError, match=r"builtins\.int is not an EnvPool environment"):
        MultiThreadedEnvWrapper(3)
    with pytest.raises(EnvBuildError, match="batch_size 1 of num_envs 2"):
        MultiThreadedEnvWrapper(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2, batch_size=1))
    env = MultiThreadedEnv(2, "Pendulum-v1")
    with pytest.raises(InvalidAction, match="nan"):
        env.step(env.reset().set("action", torch.full((2, 1), float("nan"))))


@needs_torchrl
@pytest.mark.parametrize("kwargs", [{}, {"categorical_action_encoding": True}, {"frame_skip": 2}, {"device": "cpu"}])
@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "CheetahRun-v1", "Blackjack-v1"])
def test_torchrl_checks_the_specs(task: str, kwargs: dict[str, Any]) -> None:
    from torchrl.envs import EnvBase
    from torchrl.envs.utils import check_env_specs

    env = MultiThreadedEnv(2, task, **kwargs)
    assert isinstance(env, EnvBase)
    check_env_specs(env)


def test_a_closed_environment_begins_again_and_takes_whole_floats() -> None:
    env = cartpole(2, 0)
    assert type(env).lib is envpool
    env.close()
    begun = env.reset()
    begun["action"] = torch.ones(2)
    assert env.step(begun)["next", "reward"].flatten().tolist() == [1.0, 1.0]
    begun["action"] = torch.full((2,), 0.5)
    with pytest.raises(ValueError, match="is float32 of shape"):
        env.step(begun)
    env.close()
