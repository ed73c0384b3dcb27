"""Policies that are functions in JAX. Imports JAX where one is called."""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from cormorant_worker.policy.exploration import is_greedy
from cormorant_worker.spaces import map_arrays

Act = Callable[[Any, Any, Any], Any]


class JaxPolicy(nn.Module):
    """A policy that is a pure function in JAX, such as one around the `apply` of a network in Flax.

    A torch module like any other: it takes published weights, under names such as "params.Dense_0.kernel". Environments
    of `env.jax` play it many steps at a time, in one compiled loop; elsewhere one call is a compiled function.
    """

    def __init__(self, act: Act, params: Mapping[str, Any]) -> None:
        """Take a function and the parameters to begin with.

        Args:
            act: `act(params, observation, key)` returns actions [n, ...], or a mapping with "action" and whatever
                else is to be stored. `observation` is [n, ...], nested like the space; `key` is a key of
                `jax.random`, or None where the best action is asked for.
            params: nested dicts of arrays; floating-point ones are parameters, others buffers.

        Raises:
            KeyError: a name that a torch module cannot give to a parameter.
        """
        super().__init__()
        self.act = act
        self.params = _module(params)

    def arrays(self) -> dict[str, Any]:
        """The parameters as they are now: nested dicts of arrays, which are copies."""
        return _arrays(self.params)

    def draw_keys(self, num_calls: int) -> Any:
        """[num_calls, 2] a key for each call, from torch's generator; None: the best actions are asked for."""
        return None if is_greedy() else np.asarray(_keys()(torch.randint(1 << 31, (num_calls,)).numpy()))

    def forward(self, observation: Any) -> Any:
        """Actions [n, ...], or the mapping with them, as tensors."""
        keys = self.draw_keys(1)
        key = None if keys is None else keys[0]
        found = _compiled(self.act)(self.arrays(), map_arrays(_host, observation), key)
        return map_arrays(_tensor, found)


def _module(params: Mapping[str, Any]) -> nn.Module:
    module = nn.Module()
    for name, value in params.items():
        if isinstance(value, Mapping):
            module.add_module(name, _module(value))
            continue
        tensor = _tensor(value)
        if tensor.is_floating_point():
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module


def _arrays(module: nn.Module) -> dict[str, Any]:
    tensors = {**module._parameters, **module._buffers}
    held = {name: np.array(_host(tensor)) for name, tensor in tensors.items() if tensor is not None}
    return held | {name: _arrays(part) for name, part in module._modules.items() if part is not None}


def _tensor(value: Any) -> torch.Tensor:
    """A copy; of bfloat16, which numpy lacks, in float32."""
    array = np.array(value)
    return torch.from_numpy(array.astype(np.float32) if array.dtype.name == "bfloat16" else array)


def _host(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


@lru_cache(maxsize=64)
def _compiled(act: Act) -> Any:
    import jax

    return jax.jit(act)


@cache
def _keys() -> Any:
    import jax

    return jax.jit(jax.vmap(jax.random.PRNGKey))
