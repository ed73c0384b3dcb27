"""Normalizes observations for the policy, with the statistics of its current version.

    raw [n, ...] -> (raw - mean) / std in float64 -> clipped -> float32 -> the policy

Frames keep the raw values. Statistics change with the weights, between batches, through `Normalizer.use`.
"""

from collections.abc import Sequence

import gymnasium
import numpy as np
import torch

from cormorant_contract.collection import Normalize
from cormorant_worker.errors import ManifestError
from cormorant_worker.normalize import REWARD, RunningMoments, Statistics
from cormorant_worker.spaces import Array, Arrays, Leaf, Space, leaf_spaces, leaves, with_leaves


class Normalizer:
    """The normalized leaves and their current statistics. Used by the thread that calls the policy."""

    def __init__(self, settings: Normalize, observation: Space) -> None:
        """Choose the leaves. Raises ManifestError where a key is unknown, or what it names cannot be normalized."""
        self.settings = settings
        self._leaves = leaves(observation, ("observation",))
        chosen = _chosen(settings, self._leaves)
        self.names = tuple("/".join(leaf.key) if leaf in chosen else "" for leaf in self._leaves)
        """By leaf; empty: it stays as it is."""
        clip = settings.observation.clip if settings.observation is not None else 0.0
        bound = clip or np.inf
        seen = (
            gymnasium.spaces.Box(-bound, bound, leaf.shape, np.float32) if leaf in chosen else part
            for leaf, part in zip(self._leaves, leaf_spaces(observation), strict=True)
        )
        self.space = with_leaves(observation, seen)
        """One environment's observation as the policy sees it: float32 where it is normalized."""
        moments = {"/".join(leaf.key): RunningMoments.none(leaf.shape, clip=clip) for leaf in chosen}
        if settings.reward is not None:
            moments[REWARD] = RunningMoments.none((), clip=settings.reward.clip)
        self.empty = Statistics(moments)
        """Before there are any: values pass, clipped."""
        self.statistics = self.empty
        self._scales: list[tuple[Array, Array, float] | None] = []
        self._on_device: list[list[torch.Tensor]] = []
        self.use(self.empty)

    def use(self, statistics: Statistics) -> None:
        """Use these statistics from now on."""
        scales: list[tuple[Array, Array, float] | None] = []
        for name, leaf in zip(self.names, self._leaves, strict=True):
            moments = statistics.moments.get(name) if name else None
            if name and (moments is None or moments.mean.shape != leaf.shape):
                found = "none" if moments is None else f"of shape {list(moments.mean.shape)}"
                raise ManifestError(
                    f"the statistics for {name} are {found}, the environment's observation has shape "
                    f"{list(leaf.shape)}; use statistics of the same environment and the same normalize block"
                )
            scales.append(None if moments is None else (moments.center, moments.std, moments.clip))
        self._scales, self.statistics = scales, statistics
        for scale, moved in zip(scales, self._on_device, strict=False):
            # In place: a graph reads them where they are.
            for tensor, array in zip(moved, scale or (), strict=False):
                tensor.copy_(torch.as_tensor(array))

    def __call__(self, obs: Arrays) -> Arrays:
        """Observations [n, ...] per leaf, as the policy sees them."""
        return tuple([a if scale is None else _scaled(a, *scale) for a, scale in zip(obs, self._scales, strict=True)])

    def on_tensors(self, obs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same for tensors, where they are."""
        if not self._on_device:
            self._on_device = [
                [torch.tensor(array, device=a.device) for array in scale[:2]] if scale else []
                for a, scale in zip(obs, self._scales, strict=True)
            ]
        normalized = list(obs)
        for i, scale in enumerate(self._scales):
            if scale is not None:
                center, std = self._on_device[i]
                values = (obs[i].double() - center) / std
                normalized[i] = (values.clamp(-scale[2], scale[2]) if scale[2] else values).float()
        return normalized


def _scaled(raw: Array, center: Array, std: Array, clip: float) -> Array:
    values = np.subtract(raw, center, dtype=np.float64)
    np.divide(values, std, out=values)
    if clip:
        np.minimum(values, clip, out=values)
        np.maximum(values, -clip, out=values)
    return values.astype(np.float32)


def _chosen(settings: Normalize, found: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    if settings.observation is None:
        return ()
    field = "spec.collection.normalize.observation"
    by_key = {".".join(leaf.key[1:] if leaf.key[0] == "observation" else leaf.key): leaf for leaf in found}
    keys = settings.observation.keys or [key for key, leaf in by_key.items() if leaf.dtype.kind == "f"]
    if not keys or any(key not in by_key or by_key[key].dtype.kind != "f" for key in keys):
        has = ", ".join(f"{name} {leaf.dtype.name}".strip() for name, leaf in by_key.items())
        raise ManifestError(
            f"{field} is for floating-point values, and the observation has {has}; remove it, or correct its keys"
        )
    return tuple(by_key[key] for key in keys)
