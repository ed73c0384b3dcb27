"""What a policy computed in bfloat16 as `torch.bfloat16` again: blocks, HTTP and datasets carry it as float32."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase

from cormorant_postproc.protocol import PostprocError


class InBfloat16:
    """Casts keys to bfloat16, and recurrent states in `next` as well, where no value changes by it.

    Args:
        keys: as a manifest spells them: nested keys with dots.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Take a batch of any shape. Raises PostprocError where it lacks a key, or bfloat16 would round a value."""
        result: TensorDict = batch.copy()
        for key in self.keys:
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
