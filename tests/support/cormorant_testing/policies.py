"""Policies whose every output is known by heart. Named by entrypoint in manifests, so that workers import them.

TensorDict is imported where a policy needs it: that takes each new process two seconds.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Versioned(nn.Module):
    """For the action kind "box": acts (number, noise). Publish `number` = version: each action names its weights."""

    def __init__(self, *spaces: Any) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, observation: Tensor) -> Tensor:
        n = observation.shape[0]
        return torch.stack([self.number.expand(n), torch.rand(n)], -1)


versioned = Versioned


def numbered(version: int) -> dict[str, Tensor]:
    """Weights for `versioned`: it acts this number."""
    return {"number": torch.tensor(float(version)), "bias": torch.full((3,), float(version))}


class Seer(Versioned):
    """As `Versioned`, and writes down what it saw."""

    def forward(self, observation: Tensor) -> Any:
        return {"action": super().forward(observation), "seen": observation.clone()}


seer = Seer


def counter(observation_space: Any, action_space: Any) -> nn.Module:
    from cormorant_testing.recurrent import Counter

    return Counter()


def plain(observation_space: Any, action_space: Any) -> Callable[[Tensor], Tensor]:
    """A plain callable: acts step % 5."""
    return lambda observation: observation[:, 2].long() % 5


def with_outputs(observation_space: Any, action_space: Any) -> Callable[[Tensor], dict[str, Any]]:
    """A plain callable with further outputs, one of them nested."""

    def act(observation: Tensor) -> dict[str, Any]:
        step = observation[:, 2]
        return {"action": step.long() % 5, "doubled": step * 2, "extra": {"twin": observation[:, :2]}}

    return act


def several(observation_space: Any, action_space: Any) -> dict[str, nn.Module]:
    """Actor and critic: both take weights, one acts."""
    return {"policy": Versioned(), "critic": nn.Linear(4, 1)}


def raising(observation_space: Any, action_space: Any) -> nn.Module:
    raise RuntimeError("no weights for this planet")


def wrong_type(observation_space: Any, action_space: Any) -> int:
    return 42


def wrong_shape(observation_space: Any, action_space: Any) -> Callable[[Tensor], Tensor]:
    return lambda observation: torch.zeros(observation.shape[0], 5, dtype=torch.int64)


def floats(observation_space: Any, action_space: Any) -> Callable[[Tensor], Tensor]:
    return lambda observation: torch.full((observation.shape[0],), 0.5)


def in_place(observation_space: Any, action_space: Any) -> Callable[[Tensor], Tensor]:
    return lambda observation: observation.mul_(0.5).sum(-1).long() * 0


def nan_at(observation_space: Any, action_space: Any, *, step: int) -> Callable[[Tensor], Tensor]:
    """For the action kind "box": NaN for every environment that has made `step` steps in its episode."""

    def act(observation: Tensor) -> Tensor:
        actions = torch.zeros(observation.shape[0], 2)
        actions[observation[:, 2] == step] = float("nan")
        return actions

    return act


def constant(observation_space: Any, action_space: Any, *, action: int) -> Callable[[Tensor], Tensor]:
    return lambda observation: torch.full(observation.shape[:1], action)


def raising_at(observation_space: Any, action_space: Any, *, step: int) -> Callable[[Tensor], Tensor]:
    def act(observation: Tensor) -> Tensor:
        if (observation[:, 2] == step).any():
            raise RuntimeError(f"cannot bear step {step}")
        return torch.zeros(observation.shape[0], dtype=torch.int64)

    return act


class Restless(nn.Module):
    """Changes a buffer and an attribute in each call, and draws from every global generator."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.total, self.num_actions = 0.0, int(action_space.n)
        self.layer = nn.Linear(self.num_actions, self.num_actions)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, obs: Tensor) -> Tensor:
        self.calls += 1
        self.total += float(obs.sum())
        drawn = random.random() + np.random.random() + float(torch.rand(()))
        number = int(1000 * drawn + float(self.calls) + 10 * abs(self.total))
        return torch.full((len(obs),), number % self.num_actions)


def locked(observation_space: Any, action_space: Any) -> Restless:
    policy = Restless(observation_space, action_space)
    policy.lock = threading.Lock()
    return policy


class Board(nn.Module):
    """The legal move of TicTacToe that a linear layer likes best."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.likes = nn.Linear(18, 9)

    def forward(self, seen: Any) -> Tensor:
        liked: Tensor = self.likes(seen["observation"].flatten(1).float())
        return liked.masked_fill(~seen["action_mask"], -torch.inf).argmax(-1)
