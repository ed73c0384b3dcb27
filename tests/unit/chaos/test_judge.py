"""What judges the chaos schedules finds what it is there for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cormorant_testing.chaos.judge import Finding, Judge
from cormorant_testing.chaos.witness import STEP, WitnessEnv

VERSION = 3


def played(env: WitnessEnv, obs: Any, steps: int, traj: int) -> tuple[dict[str, Any], Any]:
    """A batch `[1, T]` of one environment, without an end, and what follows it."""
    actions = np.array([[VERSION, step] for step in range(steps)], np.float32)
    reached, rewards, terminated, truncated, _ = zip(*map(env.step, actions), strict=True)
    assert not any(terminated + truncated), "choose fewer steps"
    following = {name: np.zeros((1, steps, 1), bool) for name in ("done", "terminated", "truncated")}
    batch = {
        "observation": np.array([[obs, *reached[:-1]]]),
        "action": actions[None],
        "next": {
            "observation": np.array([reached]), "reward": np.array(rewards, np.float32)[None, :, None], **following,
        },
        "collector": {"traj_ids": np.full((1, steps), traj), "policy_version": np.full((1, steps), VERSION)},
    }  # fmt: skip
    return batch, reached[-1]


def begun() -> tuple[WitnessEnv, Any]:
    """An environment whose first episode takes 9 steps."""
    env = WitnessEnv()
    return env, env.reset(seed=5)[0]


def test_an_id_that_stands_for_two_futures_is_found() -> None:
    judge, (env, obs) = Judge(may_miss=True), begun()
    (other := WitnessEnv()).set_state(env.get_state())
    judge.take(played(env, obs, 2, 5)[0])
    judge.take(played(other, obs, 2, 5)[0])
    with pytest.raises(Finding, match="trajectory 5 was delivered twice at one step"):
        judge.finish()


def test_a_stream_that_begins_twice_is_found() -> None:
    judge = Judge()
    for traj in (5, 6):
        env, obs = begun()
        judge.take(played(env, obs, 2, traj)[0])
    with pytest.raises(Finding, match="seed 5 began 2 times"):
        judge.finish()


def test_frames_that_are_missing_are_found_unless_they_may_be() -> None:
    judge, (env, obs) = Judge(), begun()
    for part in range(3):
        batch, obs = played(env, obs, 1, 5)
        if part != 1:
            judge.take(batch)
    with pytest.raises(Finding, match="trajectory 5 misses frames"):
        judge.finish()
    judge.may_miss = True
    judge.finish()


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda batch: batch["next"]["reward"].__iadd__(1), "reward of frame 0"),
        (lambda batch: batch["collector"]["policy_version"].__iadd__(1), "acting version of frame 0"),
        (lambda batch: batch["observation"][..., STEP].__iadd__(1), "next observation of frame 0"),
    ],
)
def test_a_wrong_value_is_found_at_once(break_it: Callable[[Any], object], words: str) -> None:
    env, obs = begun()
    batch, _ = played(env, obs, 2, 5)
    break_it(batch)
    with pytest.raises(Finding, match=words):
        Judge().take(batch)
