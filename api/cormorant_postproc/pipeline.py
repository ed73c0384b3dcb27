"""The pipeline of post-processing, the one of a manifest, and steps that change one leaf."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from cormorant_postproc.multi_step import MultiStep
from cormorant_postproc.pieces import PostprocError
from cormorant_postproc.split import split_trajectories


class Pipeline:
    """Applies one step after another.

    Pipeline([RewardClip(), MultiStep(gamma=0.99, n_steps=3)])
    """

    def __init__(self, steps: Sequence[Callable[[TensorDictBase], TensorDict]]) -> None:
        self.steps = tuple(steps)

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Apply all steps to the batch; without steps, return a shallow copy."""
        result: TensorDict = batch.copy() if not self.steps else batch
        for step in self.steps:
            result = step(result)
        return result


def of_collection(settings: Mapping[str, Any]) -> Pipeline:
    """Pipeline of `Collection.post_processing`, plain data: multi-step targets, then trajectories, then dtypes."""
    steps: list[Callable[[TensorDictBase], TensorDict]] = []
    if (multi_step := settings.get("multi_step")) is not None:
        steps.append(MultiStep(gamma=multi_step["gamma"], n_steps=multi_step["steps"]))
    if settings.get("split_trajectories"):
        steps.append(split_trajectories)
    if keys := settings.get("bfloat16"):
        steps.append(partial(in_bfloat16, keys=keys))
    return Pipeline(steps)


class RewardClip:
    """Clamps `("next", "reward")` to `low..high`. Statistics of returns are not clipped.

    Args:
        low: smallest reward.
        high: largest reward.

    Raises:
        PostprocError: `low` is above `high`.
    """

    def __init__(self, low: float = -1.0, high: float = 1.0) -> None:
        if not low <= high:
            raise PostprocError(f"low {low} is above high {high}; swap them")
        self.low = low
        self.high = high

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Take a batch of any shape. Raises PostprocError where it has no `("next", "reward")`."""
        reward = batch.get(("next", "reward"), None)
        if reward is None:
            raise PostprocError("the batch has no next.reward; there is nothing to clip")
        result: TensorDict = batch.copy()
        result["next", "reward"] = reward.clamp(self.low, self.high)
        return result


def in_bfloat16(batch: TensorDictBase, keys: Sequence[str]) -> TensorDict:
    """Cast keys, nested ones with dots, to bfloat16, and states in `next` as well, where that changes no value. Raises
    PostprocError where the batch lacks a key, or bfloat16 would round a value.
    """
    result: TensorDict = batch.copy()
    for key in keys:
        path = tuple(key.split("."))
        result[path] = _exactly(key, batch.get(path, None))
        if (following := batch.get(("next", *path), None)) is not None:
            result["next", *path] = _exactly(f"next.{key}", following)
    return result


def _exactly(key: str, values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        raise PostprocError(f"collection.bfloat16 names {key}, which the batch does not have; remove it")
    cast = values.bfloat16()
    rounded = (cast.to(values.dtype) != values) & (values == values)  # NaN is no other value
    if rounded.any():
        raise PostprocError(
            f"{key} holds {values[rounded][0].item()}, which bfloat16 would round to {cast[rounded][0].item()}: the "
            "policy did not compute it in bfloat16; remove the key from collection.bfloat16"
        )
    return cast
