"""Action heads of the built-in policies: parameters of a distribution in, actions of any space out.

Sampling is written with as few torch calls as it takes, because at 8 environments a torch call costs more than its
arithmetic: categorical actions by the Gumbel-max trick (argmax of logits plus Gumbel noise draws from the softmax;
Gumbel 1954, Maddison et al. 2014), in 3 calls where `torch.distributions` takes 20; on a CPU, in numpy, whose
calls cost less.

# n rows, P parameters, A actions of one categorical
"""

import math
from typing import Protocol

import gymnasium
import numpy as np
import torch
from torch import Tensor

from cormorant_worker.errors import PolicyMismatch
from cormorant_worker.policy.exploration import is_greedy
from cormorant_worker.spaces import Array, Space


class ActionHead(Protocol):
    """Turns `num_params` numbers a row into one leaf of the action space."""

    num_params: int

    def act(self, params: Tensor) -> Tensor:
        """Draw (or, when greedy, choose) actions: `[n, P]` float32 -> `[n, ...]`."""

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-probability or log-density of actions, summed over their dimensions: `[n]` float32."""

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats, summed over the action's dimensions: `[n]` float32."""


class CategoricalHead:
    """Discrete: P = A logits."""

    def __init__(self, space: gymnasium.spaces.Discrete) -> None:
        self.num_params = int(space.n)
        self.first = int(space.start)
        """The lowest action."""

    def act(self, params: Tensor) -> Tensor:
        """`[n, A]` logits -> `[n]` int64."""
        index = params.argmax(-1) if is_greedy() else _gumbel_argmax(params)
        return index + self.first if self.first else index

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        logp = params.log_softmax(-1)
        return logp.gather(-1, (action - self.first).long().unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """`[n]`, at most log A."""
        logp = params.log_softmax(-1)
        return -(logp.exp() * logp).sum(-1)


class MultiCategoricalHead:
    """MultiDiscrete of one dimension or more: one categorical each, their logits side by side."""

    def __init__(self, space: gymnasium.spaces.MultiDiscrete) -> None:
        self._sizes = [int(n) for n in np.asarray(space.nvec).reshape(-1)]
        self._shape = tuple(space.shape)
        self._start = torch.as_tensor(np.asarray(space.start).reshape(-1))
        self.num_params = sum(self._sizes)

    def act(self, params: Tensor) -> Tensor:
        """`[n, P]` logits -> `[n, *shape]` int64."""
        greedy = is_greedy()
        parts = [p.argmax(-1) if greedy else _gumbel_argmax(p) for p in torch.split(params, self._sizes, -1)]
        chosen = torch.stack(parts, -1) + self._start.to(params.device)
        return chosen.reshape(-1, *self._shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        index = action.reshape(len(action), -1).long() - self._start.to(params.device)
        logps = [p.log_softmax(-1) for p in torch.split(params, self._sizes, -1)]
        return torch.stack([lp.gather(-1, index[:, i : i + 1])[:, 0] for i, lp in enumerate(logps)], -1).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        logps = [p.log_softmax(-1) for p in torch.split(params, self._sizes, -1)]
        return torch.stack([-(lp.exp() * lp).sum(-1) for lp in logps], -1).sum(-1)


class BernoulliHead:
    """MultiBinary: one logit a bit."""

    def __init__(self, space: gymnasium.spaces.MultiBinary) -> None:
        self._shape = tuple(space.shape)
        self.num_params = math.prod(self._shape)

    def act(self, params: Tensor) -> Tensor:
        """`[n, P]` logits -> `[n, *shape]` int8."""
        bits = params > 0 if is_greedy() else torch.rand_like(params) < params.sigmoid()
        return bits.to(torch.int8).reshape(-1, *self._shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        bits = action.reshape(len(action), -1).to(params.dtype)
        return -torch.nn.functional.binary_cross_entropy_with_logits(params, bits, reduction="none").sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        p = params.sigmoid()
        return torch.nn.functional.binary_cross_entropy_with_logits(params, p, reduction="none").sum(-1)


class NormalHead:
    """Box: means and log standard deviations side by side, P = 2 * size. Unbounded: environments clip."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        self._shape = tuple(space.shape)
        self._size = math.prod(self._shape)
        self.num_params = 2 * self._size

    def act(self, params: Tensor) -> Tensor:
        """`[n, 2 * size]` -> `[n, *shape]` float32."""
        loc, log_std = torch.split(params, self._size, -1)
        if not is_greedy():
            loc = torch.addcmul(loc, torch.randn_like(loc), log_std.exp())
        return loc.reshape(-1, *self._shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        loc, log_std = torch.split(params, self._size, -1)
        z = (action.reshape(len(action), -1).to(loc.dtype) - loc) * (-log_std).exp()
        return (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        return (torch.split(params, self._size, -1)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def make_head(space: Space) -> ActionHead:
    match space:
        case gymnasium.spaces.Discrete():
            return CategoricalHead(space)
        case gymnasium.spaces.MultiDiscrete():
            return MultiCategoricalHead(space)
        case gymnasium.spaces.MultiBinary():
            return BernoulliHead(space)
        case gymnasium.spaces.Box() if np.dtype(space.dtype).kind == "f":
            return NormalHead(space)
    raise PolicyMismatch(f"the built-in policies do not support the action space {space}; write your own policy")


def gumbel_argmax(logits: Array, noise: Array) -> Array:
    """Indices `[n]` int64 for logits `[n, A]` and noise `[n, A]` from Exp(1), which is overwritten."""
    # -log(E) with E ~ Exp(1) is Gumbel noise.
    np.log(noise, out=noise)
    index: Array = np.subtract(logits, noise, out=noise).argmax(-1)
    return index


def _gumbel_argmax(logits: Tensor) -> Tensor:
    array = None if torch.is_grad_enabled() else _as_array(logits)
    noise = torch.empty_like(logits).exponential_()
    if array is None:
        return (logits - noise.log_()).argmax(-1)
    return torch.as_tensor(gumbel_argmax(array, noise.numpy()))


def _as_array(logits: Tensor) -> Array | None:
    """The same memory; None where numpy cannot draw: on a device, in another dtype, or where torch records or batches
    operations (`torch.export`, `torch.jit.trace`, `torch.vmap`).
    """
    if not logits.is_cpu or logits.dtype != torch.float32:
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return None
    try:
        array: Array = logits.numpy()
    except RuntimeError:  # a tensor of vmap or of a fake mode has no memory
        return None
    return array
