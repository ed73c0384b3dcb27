"""gymnax, Brax and jumanji themselves, frame by frame against loops over their raw functions: `make test-jax`."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from cormorant_contract.env import Env
from cormorant_testing.functional import brax, gymnax, jumanji, plain
from cormorant_worker.envs.kinds import kind_of
from cormorant_worker.envs.protocol import EVERY_ROW
from cormorant_worker.envs.request import EnvRequest

N, STEPS = 3, 40
BALL = {"env_name": "inverted_pendulum", "backend": "spring", "auto_reset": False, "episode_length": 15}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entrypoint", "kwargs", "limit", "functions"),
    [
        ("gymnax:make", {"env_id": "CartPole-v1"}, 30, lambda made: gymnax(made[0])),
        ("gymnax:make", {"env_id": "MountainCar-v0"}, 15, lambda made: gymnax(made[0])),
        ("jumanji:make", {"id": "Snake-v1"}, 25, jumanji),
        ("brax.envs:create", BALL, 0, brax),
    ],
    ids=["cartpole", "mountain-car", "snake", "pendulum"],
)
def test_frames_are_those_of_the_library(entrypoint: str, kwargs: Any, limit: int, functions: Any) -> None:
    module, _, name = entrypoint.partition(":")
    pytest.importorskip(module.partition(".")[0])
    block = Env.model_validate(
        {"jax": {"entrypoint": entrypoint, "numEnvs": N, "kwargs": kwargs}, "maxEpisodeSteps": limit}
    )
    env = kind_of(block).open_envs(EnvRequest(env=block, seeds_of=lambda num_envs: [*range(num_envs)])).groups[0]
    env.action_space.seed(3)
    actions = np.asarray([[env.action_space.sample() for _ in range(N)] for _ in range(STEPS)])
    raw = functions(getattr(import_module(module), name)(**kwargs))
    wanted = [plain(raw, seed, actions[:, seed], limit) for seed in range(N)]
    env.start()
    ends = 0
    for t in range(STEPS):
        env.send((actions[t],), EVERY_ROW)
        step = env.recv()
        after, ends = tuple(leaf.copy() for leaf in step.obs), ends + len(step.ended)
        for leaf, final in zip(after, step.final, strict=True):
            leaf[step.ended] = final
        for row in range(N):
            _, reward, terminated, truncated, following, _ = wanted[row][t]
            assert (step.terminated[row], step.truncated[row]) == (terminated, truncated)
            for a, b in zip((*(leaf[row] for leaf in after), step.reward[row]), (*following, reward), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert ends
