"""ALE's own vector environment, frame by frame against plain loops over single rows of it."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

from cormorant_testing.vectors import transitions
from cormorant_worker.envs.flat_vector import VectorSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.vector import GymVectorEnv

SEEDS = (7, 8, 9, 10)
STEPS = 60
SHORT = {"max_num_frames_per_episode": 60, "noop_max": 30, "frameskip": 4}
LIVES = InfoField(key="episode_frame_number", dtype="int64", shape=(), fill=-1)


@pytest.fixture(scope="module", autouse=True)
def registry() -> Iterator[None]:
    """ALE registers its games when it is imported, which other tests must not see."""
    known = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(known)


def draw_actions() -> Any:
    return np.random.default_rng(1).integers(0, 4, (STEPS, len(SEEDS)))


def plain(row: int) -> list[tuple[Any, ...]]:
    """A loop over one row, which drops the step after an end."""
    from ale_py.vector_env import AtariVectorEnv

    env, frames = AtariVectorEnv("breakout", 1, autoreset_mode="NextStep", **SHORT), []
    obs, _ = env.reset(seed=np.array([SEEDS[row]]))
    for action in draw_actions()[:, row]:
        obs = obs.copy()
        after, reward, terminated, truncated, info = env.step(np.array([action]))
        flags = bool(terminated[0]), bool(truncated[0])
        frames.append((obs[0], float(reward[0]), *flags, after[0].copy(), int(info["episode_frame_number"][0])))
        obs = env.step(np.array([0]))[0] if any(flags) else after
    return frames


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_frames_are_those_of_single_rows(mode: str) -> None:
    kwargs = {"game": "breakout", "autoreset_mode": mode, **SHORT}
    source = VectorSource(entrypoint="ale_py.vector_env:AtariVectorEnv", kwargs=kwargs)
    env = GymVectorEnv(source, seeds=SEEDS, info=[LIVES])
    assert env.lockstep
    found, ends = transitions(env, draw_actions()), 0
    env.close()
    for row, frames in enumerate(found):
        for t, (frame, (before, reward, *flags, after, number)) in enumerate(zip(frames, plain(row), strict=True)):
            ends += any(flags)
            # ALE gives no info of a step that it resets in.
            told = LIVES.fill if any(flags) and mode == "SameStep" else number
            wanted = before, draw_actions()[t, row], reward, *flags, after, told
            for a, b in zip(frame, wanted, strict=True):
                np.testing.assert_array_equal(a, b, f"row {row}, step {t}")
    assert ends >= 2 * len(SEEDS)
