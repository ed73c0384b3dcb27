"""An environment that does nothing, and a policy of one tensor."""

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn


class NullEnv(gymnasium.Env[Any, Any]):
    """Takes a tenth of a second a step, so that hundreds of them share a few processors."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.1)
        return np.zeros(4, np.float32), 0.0, False, False, {}


class NullPolicy(nn.Module):
    """Always the first action."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(observation.shape[0], dtype=torch.int64)


def make_policy(observation_space: Any, action_space: Any) -> nn.Module:
    return NullPolicy()
