"""Modules that the built-in policies are made of: encoders of observations, and heads for actions.

# n rows, F features, P parameters of the action distributions
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from cormorant_worker.errors import PolicyMismatch
from cormorant_worker.policy.action_heads import ActionHead, NormalHead, make_head
from cormorant_worker.spaces import Space, leaf_spaces, leaves, put_nested, unflattener

Activation = Literal["tanh", "relu"]
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], type[nn.Module]]] = {
    "tanh": (torch.tanh, nn.Tanh),
    "relu": (torch.relu, nn.ReLU),
}


class VectorEncoder(nn.Module):
    """Flattens and joins the leaves of an observation into `[n, F]` float32."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._parts = leaf_spaces(space)
        self._keys = [leaf.key for leaf in leaves(space, ())]
        self.num_features = sum(_width(part) for part in self._parts)
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
        if any(width < 1 for width in hidden):
            raise PolicyMismatch(f"hidden widths {list(hidden)} must be 1 or more")
        self._activation, self.activation = _ACTIVATIONS[activation]
        widths = zip((num_features, *hidden), hidden, strict=False)
        self._linears = [nn.Linear(width_in, width_out) for width_in, width_out in widths]
        for layer in self._linears:
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(self._linears)

    def forward(self, features: Tensor) -> Tensor:
        """`[n, F]` -> `[n, last width]` float32."""
        for layer in self._linears:
            features = self._activation(nn.functional.linear(features, layer.weight, layer.bias))
        return features


class ImageEncoder(nn.Module):
    """Three convolutions over `[n, C, H, W]` uint8 pixels, scaled to 0..1."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 3 or space.dtype != np.uint8:
            raise PolicyMismatch(f"atari_cnn expects one uint8 image [channels, height, width], not {space}; try mlp")
        channels, *size = space.shape
        if min(size) < 36:
            raise PolicyMismatch(
                f"atari_cnn expects images of 36 x 36 pixels or more, not {size[0]} x {size[1]}; try mlp"
            )
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 32, 8, stride=4), nn.ReLU(inplace=True),
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
        pixels = nn.functional.conv2d(observation.float(), first.weight * (1 / 255), first.bias, first.stride)
        return self.convolutions[1:](pixels)  # type: ignore[no-any-return]  # nn.Module is untyped


class ActionHeads(nn.Module):
    """One linear layer to the parameters of all leaves of the action space; Gaussian log-deviations are free."""

    def __init__(self, num_features: int, space: Space) -> None:
        super().__init__()
        self._heads = [make_head(part) for part in leaf_spaces(space)]
        self._nest = unflattener(space) if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple) else None
        self._keys = [leaf.key for leaf in leaves(space, ())]
        self._sizes = [head.num_params for head in self._heads]
        # A NormalHead's deviations do not depend on the observation (as in PPO's reference implementation).
        widths = [n // 2 if isinstance(h, NormalHead) else n for h, n in zip(self._heads, self._sizes, strict=True)]
        self._widths = widths
        self.linear = nn.Linear(num_features, sum(widths))
        nn.init.orthogonal_(self.linear.weight, 0.01)
        nn.init.zeros_(self.linear.bias)
        deviations = sum(n - w for n, w in zip(self._sizes, widths, strict=True))
        self.log_std = nn.Parameter(torch.zeros(deviations)) if deviations else None

    @property
    def only(self) -> ActionHead | None:
        """The head of an action that is one array."""
        return self._heads[0] if self._nest is None else None

    def forward(self, features: Tensor) -> Tensor:
        """`[n, F]` -> `[n, P]`: the parameters of every leaf side by side."""
        return self.arrange(nn.functional.linear(features, self.linear.weight, self.linear.bias))

    def arrange(self, linear: Tensor) -> Tensor:
        """What `linear` gives, with the Gaussian log-deviations beside their means: `[n, P]`."""
        if self.log_std is None:
            return linear
        if len(self._heads) == 1:
            return torch.cat([linear, self.log_std.expand_as(linear)], -1)
        parts, taken = [], 0
        for width, size, mean in zip(self._widths, self._sizes, torch.split(linear, self._widths, -1), strict=True):
            parts.append(mean)
            if size != width:
                parts.append(self.log_std[taken : taken + width].expand_as(mean))
                taken += width
        return torch.cat(parts, -1)

    def act(self, params: Tensor) -> tuple[Any, list[Tensor]]:
        """Draw actions: nested like the action space, and the same as a list of leaves."""
        if len(self._heads) == 1:
            drawn = [self._heads[0].act(params)]
        else:
            drawn = [h.act(p) for h, p in zip(self._heads, torch.split(params, self._sizes, -1), strict=True)]
        if self._nest is None:
            return drawn[0], drawn
        nested: dict[str, Any] = {}
        for key, value in zip(self._keys, drawn, strict=True):
            put_nested(nested, key, value)
        return nested, drawn

    def log_prob(self, params: Tensor, action: Any) -> Tensor:
        """`[n]`: summed over the leaves. `action` is nested like the space, or one tensor."""
        parts = torch.split(params, self._sizes, -1)
        found = [_find(action, key) for key in self._keys]
        logs = [h.log_prob(p, a) for h, p, a in zip(self._heads, parts, found, strict=True)]
        return torch.stack(logs).sum(0)

    def entropy(self, params: Tensor) -> Tensor:
        """`[n]`: summed over the leaves."""
        parts = torch.split(params, self._sizes, -1)
        return torch.stack([h.entropy(p) for h, p in zip(self._heads, parts, strict=True)]).sum(0)


def _width(space: Space) -> int:
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(space.n)
    return math.prod(space.shape or ())


def _encode(value: Tensor, space: Space) -> Tensor:
    if isinstance(space, gymnasium.spaces.Discrete):
        return nn.functional.one_hot((value - int(space.start)).long(), int(space.n)).float()
    return value.reshape(len(value), -1).float()


def _find(nested: Any, key: Sequence[str]) -> Any:
    for part in key:
        nested = nested[int(part)] if isinstance(nested, tuple | list) else nested[part]
    return nested
