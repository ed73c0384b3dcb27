"""Arguments as scripts give them to both layers: numpy's scalars, 0 or 1 for a flag, replay buffers of a capacity."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import gymnasium
    import torch
    from envpool.python.protocol import EnvPool
    from tianshou.data import ReplayBuffer
    from tianshou.env import BaseVectorEnv
    from torch import nn
    from torchrl.envs import EnvBase

Policy: TypeAlias = "nn.Module | Mapping[str, nn.Module] | Callable[..., Any]"
"""A module, a TensorDictModule, a policy of Tianshou's, a callable on observations; or modules by name, of which
"policy" acts."""

Environment: TypeAlias = "gymnasium.Env[Any, Any] | EnvBase | Callable[..., Any]"
"""An environment of gymnasium or TorchRL, or a callable that makes one."""

Keywords: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"
"""Keyword arguments for all, or for each."""

Device: TypeAlias = "torch.device | str | int"
Devices: TypeAlias = "Device | Sequence[Device | None]"
"""One for all, or one for each."""

Environments: TypeAlias = (
    "gymnasium.Env[Any, Any] | Sequence[gymnasium.Env[Any, Any] | Callable[[], gymnasium.Env[Any, Any]]]"
    " | gymnasium.vector.VectorEnv[Any, Any, Any] | BaseVectorEnv | EnvPool"
)
"""Environments of Tianshou's collectors: one, several or their makers, or a vector environment of gymnasium, Tianshou
or EnvPool."""


class Extendable(Protocol):
    """A replay buffer: TorchRL's, or any class that takes TensorDicts."""

    def extend(self, data: Any, /) -> Any: ...


Buffer: TypeAlias = "Extendable | ReplayBuffer"


def plain(value: Any) -> Any:
    """A numpy scalar as Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def as_flag(value: Any, name: str) -> bool:
    value = plain(value)
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} {value!r} is neither true nor false; give True or False")
    return bool(value)


def as_count(value: Any, name: str, *, least: int = 1) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} {value!r} is not a number of them; give {least} or more")
    return value


def room_of(buffer: Any) -> tuple[int | None, int]:
    """Most frames that a replay buffer holds, from TorchRL's attributes (None: it is of another kind or in another
    process), and the dimensions of its storage: with 2 it takes batches `[B, T]`, with 1 single frames.
    """
    storage = getattr(buffer, "_storage", None)
    capacity = getattr(storage, "max_size", None)
    return capacity if isinstance(capacity, int) else None, int(getattr(storage, "ndim", 1))
