"""The policy of every placement: it writes down all that it was given, so that any column of a batch can be derived.

action      clamp(mean + drawn / 4 + count / 64, -1, 1), with mean = tanh(trunk(seen)) / 2
"""

from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

WIDTH = 8


class Witness(nn.Module):
    """Acts, and says what it saw."""

    def __init__(self, num_values: int, num_actions: int, *, is_discrete: bool) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))
        self.trunk = nn.Sequential(nn.Linear(num_values, WIDTH), nn.Tanh(), nn.Linear(WIDTH, num_actions))
        self._is_discrete = is_discrete
        self.load_state_dict(weights_of(0, num_values, num_actions))

    def mean(self, seen: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.trunk(seen.float()))

    def forward(self, observation: Tensor, count: Tensor | float = 0.0) -> dict[str, Tensor]:
        mean = self.mean(observation)
        drawn = torch.randn_like(mean)
        choice = torch.clamp(mean + drawn / 4 + count / 64, -1, 1)
        return {
            "action": (choice[:, 0] > 0).long() if self._is_discrete else choice,
            "seen": observation.clone(),
            "acting": self.number.expand(len(mean)),
            "mean": mean,
            "drawn": drawn,
            "log_prob": -0.5 * drawn.square().sum(-1),
        }


class OwnMemory(Witness):
    """Draws nothing, and returns its actions in the same memory each time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory: dict[int, Tensor] = {}

    def forward(self, observation: Tensor, count: Tensor | float = 0.0) -> Any:
        mean = self.mean(observation)
        found = (mean[:, 0] > 0).long() if self._is_discrete else mean
        return self._memory.setdefault(len(found), torch.empty_like(found)).copy_(found)


class OverTensorDict(TensorDictModuleBase):
    """Sees `is_init`; where it is recurrent, counts the frames of a trajectory in `count`."""

    def __init__(self, witness: Witness, *, is_recurrent: bool) -> None:
        super().__init__()
        self.in_keys = ["observation", "is_init", *(["count"] if is_recurrent else [])]
        written = ["action", "seen", "acting", "mean", "drawn", "log_prob", "was_init"]
        self.out_keys = [*written, *([("next", "count")] if is_recurrent else [])]
        self.witness = witness

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        is_recurrent = "count" in self.in_keys
        count = tensordict["count"] if is_recurrent else 0.0
        tensordict.update(self.witness(tensordict["observation"], count))
        tensordict["was_init"] = tensordict["is_init"].clone()
        if is_recurrent:
            tensordict["next", "count"] = tensordict["count"] + 1
        return tensordict

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        return {"count": torch.zeros(batch_size, 1)}


def build_policy(num_values: int, num_actions: int, *, kind: str, is_discrete: bool) -> "Witness | OverTensorDict":
    made = (OwnMemory if kind == "memory" else Witness)(num_values, num_actions, is_discrete=is_discrete)
    return made if kind in ("memory", "module") else OverTensorDict(made, is_recurrent=kind == "recurrent")


def make_policy(observation_space: Any, action_space: Any, *, kind: str) -> nn.Module:
    is_discrete = isinstance(action_space, gymnasium.spaces.Discrete)
    sizes = observation_space.shape[0], 1 if is_discrete else action_space.shape[0]
    return build_policy(*sizes, kind=kind, is_discrete=is_discrete)


def weights_of(version: int, num_values: int, num_actions: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(version)
    shapes = {"0.weight": (WIDTH, num_values), "0.bias": (WIDTH,), "2.weight": (num_actions, WIDTH)}
    shapes |= {"2.bias": (num_actions,)}
    trunk = {f"trunk.{name}": torch.randn(shape, generator=draw) / 2 for name, shape in shapes.items()}
    return {"number": torch.tensor(float(version)), **trunk}
