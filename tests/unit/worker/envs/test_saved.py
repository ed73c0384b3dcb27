import json

import gymnasium
import numpy as np
import pytest

from cormorant_testing.envs import CountingEnv
from cormorant_worker.envs.saved import load_env, save_env
from cormorant_worker.errors import StateError


class Keeper(CountingEnv):
    kept: object = None

    def get_state(self):
        return {"kept": self.kept}

    def set_state(self, state):
        self.kept = state["kept"]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 2**80, 0.1, float("inf"), b"\x00\xff", (1, (2.5, "x")), {"a": {1: (2,)}}, np.float32(0.1),
        np.arange(6, dtype=np.uint8).reshape(2, 3), np.array(1.5), np.empty((0, 3), np.float32),
        np.random.default_rng(3).bit_generator.state,
    ],
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value: object) -> None:
    one, other = Keeper(), Keeper()
    one.kept = value
    load_env(other, json.loads(json.dumps(save_env(one))))
    assert type(other.kept) is type(value)
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(other.kept, value, strict=True)
    else:
        assert other.kept == value


def make_wrapped() -> gymnasium.Env:
    wrappers = gymnasium.wrappers
    env = wrappers.RecordEpisodeStatistics(wrappers.TimeLimit(CountingEnv(lengths=(5, 9)), 7))
    return wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.FrameStackObservation(env, 3)))


def play(env: gymnasium.Env, steps: int) -> list:
    found = []
    for i in range(steps):
        obs, reward, terminated, truncated, info = env.step(i % 2)
        episode = info.get("episode", {})
        found.append((obs.tolist(), float(reward), terminated, truncated, episode.get("r"), episode.get("l")))
        if terminated or truncated:
            found.append(env.reset()[0].tolist())
    return found


def test_gymnasiums_own_wrappers_are_saved() -> None:
    one, other = make_wrapped(), make_wrapped()
    for env in (one, other):
        env.reset(seed=5)
    play(one, 17)
    saved = json.dumps(save_env(one))
    play(other, 30)
    load_env(other, json.loads(saved))
    assert play(one, 25) == play(other, 25)


def test_other_values_are_refused_by_name() -> None:
    env = Keeper()
    env.kept = object()
    with pytest.raises(StateError, match="returned a object"):
        save_env(env)
