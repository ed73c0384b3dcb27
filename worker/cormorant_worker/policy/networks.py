"""Modules of the built-in policies: encoders of observations, and heads for actions of any space.

Sampling uses few torch calls, because with 8 environments a torch call costs more than its arithmetic: categorical
actions by the Gumbel-max trick (argmax of logits plus Gumbel noise draws from the softmax; Gumbel 1954, Maddison et al.
2014), in 3 calls where `torch.distributions` takes 20; on a CPU, in numpy, whose calls cost less.

# n rows, F features, P parameters of the action distributions, A actions of one categorical
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from cormorant_worker.errors import PolicyMismatch
from cormorant_worker.policy.exploration import is_greedy
from cormorant_worker.spaces import Array, Space, leaf_spaces, leaves

Activation = Literal["tanh", "relu"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}


class VectorEncoder(nn.Module):
    """Flattens and joins the leaves of an observation into `[n, F]` float32."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._parts = leaf_spaces(space)
        self._keys = [leaf.key for leaf in leaves(space, ())]
        self.num_features = sum(
            int(part.n) if isinstance(part, gymnasium.spaces.Discrete) else math.prod(part.shape or ())
            for part in self._parts
        )
        self._is_identity = (
            len(self._parts) == 1 and self._parts[0].dtype == np.float32 and len(self._parts[0].shape or ()) == 1
        )
        """One flat float32 Box, the common case, needs no work at all."""

    def forward(self, observation: Any) -> Tensor:
        """A tensor `[n, ...]`, or nested mappings or tuples of tensors -> `[n, F]` float32."""
        if self._is_identity and isinstance(observation, Tensor):
            return observation
        columns = [_encode(_find(observation, key), part) for key, part in zip(self._keys, self._parts, strict=True)]
        return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


class Perceptron(nn.Module):
    """Linear layers with an activation after each. The layers are applied as functions: a module call costs as much
    as the arithmetic of a small layer.
    """

    def __init__(self, num_features: int, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise PolicyMismatch(f'activation "{activation}" is not one of {sorted(_ACTIVATIONS)}')
        self.activation = _ACTIVATIONS[activation]
        widths = zip((num_features, *hidden), hidden, strict=False)
        self._linears = [nn.Linear(width_in, width_out) for width_in, width_out in widths]
        for layer in self._linears:
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(self._linears)

    def forward(self, features: Tensor) -> Tensor:
        """`[n, F]` -> `[n, last width]` float32."""
        for layer in self._linears:
            features = self.activation(nn.functional.linear(features, layer.weight, layer.bias))
        return features


class ImageEncoder(nn.Module):
    """Three convolutions over `[n, C, H, W]` uint8 pixels, scaled to 0..1."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 3 or space.dtype != np.uint8:
            raise PolicyMismatch(f"atari_cnn expects one uint8 image [channels, height, width], not {space}; try mlp")
        self.convolutions = nn.Sequential(
            nn.Conv2d(space.shape[0], 32, 8, stride=4), nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(inplace=True), nn.Flatten(),
        )  # fmt: skip  # one layer a line
        with torch.no_grad():
            self.num_features = int(self.convolutions(torch.zeros(1, *space.shape)).shape[1])

    def forward(self, observation: Tensor) -> Tensor:
        """`[n, C, H, W]` uint8 -> `[n, F]` float32."""
        # The scale goes into the first layer's few weights instead of over all pixels.
        first = self.convolutions[0]
        assert isinstance(first, nn.Conv2d)
        kind = observation.device.type
        # bfloat16 holds 0 to 255 exactly: a copy in float32 would only be read once more.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        pixels = nn.functional.conv2d(observation.to(dtype), first.weight * (1 / 255), first.bias, first.stride)
        return self.convolutions[1:](pixels)  # type: ignore[no-any-return]  # nn.Module is untyped


class CategoricalHead:
    """Discrete: P = A logits."""

    def __init__(self, space: gymnasium.spaces.Discrete) -> None:
        self.num_params = int(space.n)
        self.first = int(space.start)
        """The lowest action."""

    def act(self, params: Tensor) -> Tensor:
        """`[n, A]` logits -> `[n]` int64."""
        if is_greedy():
            index = params.argmax(-1)
        else:
            noise = torch.empty_like(params).exponential_()
            # numpy cannot draw on a device, in another dtype, or where torch records operations.
            is_recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
            if params.is_cpu and params.dtype == torch.float32 and not is_recorded:
                index = torch.as_tensor(gumbel_argmax(params.numpy(), noise.numpy()))
            else:
                index = (params - noise.log_()).argmax(-1)
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
        numbers = zip(np.ravel(space.nvec), np.ravel(space.start), strict=True)
        self._heads = [CategoricalHead(gymnasium.spaces.Discrete(int(n), start=int(first))) for n, first in numbers]
        self._sizes = [head.num_params for head in self._heads]
        self._shape = tuple(space.shape)
        self.num_params = sum(self._sizes)

    def act(self, params: Tensor) -> Tensor:
        """`[n, P]` logits -> `[n, *shape]` int64."""
        return torch.stack([head.act(p) for head, p in self._split(params)], -1).reshape(-1, *self._shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        chosen = action.reshape(len(action), -1).unbind(-1)
        return torch.stack([h.log_prob(p, a) for (h, p), a in zip(self._split(params), chosen, strict=True)]).sum(0)

    def entropy(self, params: Tensor) -> Tensor:
        return torch.stack([head.entropy(p) for head, p in self._split(params)]).sum(0)

    def _split(self, params: Tensor) -> "zip[tuple[CategoricalHead, Tensor]]":
        return zip(self._heads, torch.split(params, self._sizes, -1), strict=True)


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


ActionHead = CategoricalHead | MultiCategoricalHead | NormalHead
"""Turns `num_params` numbers per row into an action."""


def make_head(space: Space) -> ActionHead:
    match space:
        case gymnasium.spaces.Discrete():
            return CategoricalHead(space)
        case gymnasium.spaces.MultiDiscrete():
            return MultiCategoricalHead(space)
        case gymnasium.spaces.Box() if np.dtype(space.dtype).kind == "f":
            return NormalHead(space)
    raise PolicyMismatch(f"the built-in policies do not support the action space {space}; write your own policy")


def gumbel_argmax(logits: Array, noise: Array) -> Array:
    """Indices `[n]` int64 for logits `[n, A]` and noise `[n, A]` from Exp(1), which is overwritten."""
    # -log(E) with E ~ Exp(1) is Gumbel noise.
    np.log(noise, out=noise)
    index: Array = np.subtract(logits, noise, out=noise).argmax(-1)
    return index


class ActionHeads(nn.Module):
    """One linear layer gives the parameters of the action's distribution, except Gaussian log-deviations, which are a
    parameter of their own.
    """

    def __init__(self, num_features: int, space: Space) -> None:
        super().__init__()
        self.head = make_head(space)
        # Deviations do not depend on the observation (as in PPO's reference implementation).
        is_normal = isinstance(self.head, NormalHead)
        width = self.head.num_params // 2 if is_normal else self.head.num_params
        self.linear = nn.Linear(num_features, width)
        nn.init.orthogonal_(self.linear.weight, 0.01)
        nn.init.zeros_(self.linear.bias)
        self.log_std = nn.Parameter(torch.zeros(width)) if is_normal else None

    def forward(self, features: Tensor) -> Tensor:
        """`[n, F]` -> `[n, P]`."""
        linear = nn.functional.linear(features, self.linear.weight, self.linear.bias)
        return linear if self.log_std is None else torch.cat([linear, self.log_std.expand_as(linear)], -1)

    def act(self, params: Tensor) -> Tensor:
        """Draw (or, when greedy, choose) actions: `[n, P]` float32 -> `[n, ...]`."""
        return self.head.act(params)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Log-probability or log-density of actions, summed over their dimensions: `[n]` float32."""
        return self.head.log_prob(params, action)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy in nats, summed over the action's dimensions: `[n]` float32."""
        return self.head.entropy(params)


def _encode(value: Tensor, space: Space) -> Tensor:
    if isinstance(space, gymnasium.spaces.Discrete):
        return nn.functional.one_hot((value - int(space.start)).long(), int(space.n)).float()
    return value.reshape(len(value), -1).float()


def _find(nested: Any, key: Sequence[str]) -> Any:
    for part in key:
        nested = nested[int(part)] if isinstance(nested, tuple | list) else nested[part]
    return nested
