"""Gymnasium's vector environments, handed to Tianshou's collector."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from cormorant_compat.tianshou import Collector, LatestBatch
from cormorant_testing.envs import CountingEnv


def step_mod_5(observation: torch.Tensor) -> torch.Tensor:
    return observation[:, 2].long() % 5


def collected(env: Any, amount: Mapping[str, int]) -> TensorDict:
    collector = Collector(step_mod_5, env, LatestBatch(), seed=7)
    collector.collect(**amount)
    collector.close()
    return collector.buffer.tensordict


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("amount", [{"n_step": 30}, {"n_episode": 4}], ids=str)
def test_frames_are_those_of_single_environments(mode: AutoresetMode, amount: Mapping[str, int]) -> None:
    makers = [partial(CountingEnv, lengths=(2, 5, 3))] * 3
    found = collected(SyncVectorEnv(makers, autoreset_mode=mode), amount)
    assert (found == collected([make() for make in makers], amount)).all()
