"""Pieces of trajectories within a batch, and the protocol of post-processing. No step here waits for a GPU.

A *piece* is the part of one trajectory in a batch: consecutive frames of one row. Rows never share a piece.

# B rows (all batch dimensions but the last, flattened), T steps
"""

from typing import Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

Key = str | tuple[str, ...]

MASK: Key = ("collector", "mask")
TRAJ_IDS: Key = ("collector", "traj_ids")


def flag(batch: TensorDictBase, key: Key) -> Tensor:
    """A bool or id leaf as `[*, T]`, without a trailing dimension of 1. Raises PostprocError where it has none."""
    value = batch.get(key, None)
    if value is None:
        raise PostprocError(f"the batch has no {_name(key)}; it has {sorted(map(_name, batch.keys(True, True)))}")
    if tuple(value.shape) == (*batch.batch_size, 1):
        value = value.squeeze(-1)
    if tuple(value.shape) != tuple(batch.batch_size):
        raise PostprocError(
            f"{_name(key)} has shape {list(value.shape)} and the batch {list(batch.batch_size)}; "
            "expected one value per frame, with or without a trailing dimension of 1"
        )
    found: Tensor = value
    return found


def valid_frames(batch: TensorDictBase) -> Tensor | None:
    """`[*, T]` bool, True on frames; None when nothing is padded."""
    if batch.batch_dims == 0:
        raise PostprocError("the batch has no dimensions; its last one must be time, [*, T]")
    return flag(batch, MASK) if MASK in batch.keys(True) else None


def frames_of(batch: TensorDict) -> TensorDict:
    """Flatten a batch `[B, T]` to frames `[N]`, environment by environment, without padding and mask.

    buffer.extend(frames_of(batch))  # of TorchRL's ReplayBuffer
    """
    flat: TensorDict = batch.reshape(-1)
    if MASK not in flat.keys(True):
        return flat
    kept: TensorDict = flat[flat[MASK]].exclude(MASK)
    return kept


def last_step(ends: Tensor, valid: Tensor | None) -> Tensor:
    """The index of the last step of each frame's piece.

        ends F F T F F   ->   2 2 2 4 4

    Args:
        ends: `[*, T]` bool, True on the last frame of a trajectory.
        valid: `[*, T]` bool, or None. The last valid frame before padding ends a piece, too.

    Returns:
        `[*, T]` int64.
    """
    steps = ends.shape[-1]
    closes = ends.clone()
    closes[..., -1] = True
    if valid is not None:
        closes[..., :-1] |= ~valid[..., 1:]
    index = torch.arange(steps, device=ends.device).expand_as(ends)
    open_until = torch.where(closes, index, steps)
    return open_until.flip(-1).cummin(-1).values.flip(-1)


def first_step(ids: Tensor) -> Tensor:
    """The index of the first step of each frame's piece, `[*, T]` int64, from the ids of trajectories, `[*, T]`."""
    index = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids).clone()
    index[..., 1:].masked_fill_(ids[..., 1:] == ids[..., :-1], 0)
    return index.cummax(-1).values


def at_steps(value: Tensor, steps: Tensor) -> Tensor:
    """A copy of `value[*, steps[*, t]]`: leaves `[*, T, ...]`, of any strides, at other steps of their own rows."""
    depth = steps.ndim - 1
    rows = [
        torch.arange(n, device=steps.device).reshape(*(-1 if i == at else 1 for i in range(depth + 1)))
        for at, n in enumerate(steps.shape[:-1])
    ]
    return value[(*rows, steps)]


def under(root: str, key: Key) -> Key:
    """A key below another one: `("next", "reward")`."""
    return (root, key) if isinstance(key, str) else (root, *key)


def _name(key: Key) -> str:
    return key if isinstance(key, str) else ".".join(key)


class PostprocError(ValueError):
    """The batch, or an argument, does not fit; says what was found and what to do."""


class Postproc(Protocol):
    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Return a new batch from a batch `[*, T]`, which is not changed."""
