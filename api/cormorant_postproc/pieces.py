"""Pieces of trajectories within a batch: how a batch is cut into them, and where each begins and ends. Nothing waits
for a GPU, except that `split_trajectories` asks how many pieces there are.

A *piece* is the part of one trajectory in a batch: consecutive frames of one row. Rows never share a piece.

# B rows (all batch dimensions but the last, flattened), T steps, N pieces, M frames
"""

import warnings
from typing import Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

Key = str | tuple[str, ...]

MASK: Key = ("collector", "mask")
TRAJ_IDS: Key = ("collector", "traj_ids")
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class PostprocError(ValueError):
    """The batch, or an argument, does not fit; says what was found and what to do."""


class Postproc(Protocol):
    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Return a new batch from a batch `[*, T]`, which is not changed."""


def split_trajectories(
    batch: TensorDictBase,
    *,
    trajectory_key: Key = TRAJ_IDS,
    prefix: str | None = None,
    as_nested: bool = False,
) -> TensorDict:
    """Cut a batch into its pieces of trajectories, in time that grows with the frames and not with the pieces.

        traj_ids  0 0 0 1 1      ->      padded   a0 a1 a2    mask  T T T
                  2 2 2 2 3              [4, 4]   a3 a4             T T F
                                                  b0 b1 b2 b3       ...
                                                  b4

    Pieces are ordered by row, then by time. A piece ends where the id changes, where its row does (two rows
    with the same id are two pieces), and where padding begins.

    Args:
        batch: `[*, T]`. Frames whose `("collector", "mask")` is False are left out.
        trajectory_key: key of the trajectory ids, one per frame. If the batch has none, pieces are numbered by
            `("next", "done")`, and the numbers are stored under this key.
        prefix: as in TorchRL: ids are `(prefix, "traj_ids")`, in place of `trajectory_key`. The mask is also where the
            other functions look for it, at `("collector", "mask")`.
        as_nested: as in TorchRL: True returns `[N, -1]` with strided nested tensors.

    Returns:
        A new TensorDict `[N, longest]`, with zeros on the right, and a bool `mask` beside the ids. If every piece
        is a whole row, the unchanged batch (`[T]` becomes `[1, T]`) with a mask of True.

    Raises:
        PostprocError: the batch has no frame, or neither ids nor done, or a leaf's shape is not the batch's.
    """
    if prefix is not None:
        trajectory_key = (prefix, "traj_ids")
    valid = valid_frames(batch)
    shape = batch.batch_size
    given: TensorDict = batch.exclude(MASK) if valid is not None else batch.copy()
    begins = _begins(given, valid, trajectory_key)
    whole = torch.ones_like(begins) if valid is None else valid
    number = begins.reshape(-1).cumsum(0) - 1
    if trajectory_key not in given.keys(True):
        given[trajectory_key] = number.reshape(shape)

    frames = whole.reshape(-1).nonzero().squeeze(-1)
    if not len(frames):
        raise PostprocError(f"the batch {list(shape)} contains no frames to split")
    number = number[frames]
    # The one thing that the host must know: how many pieces there are, and how long the longest one is.
    lengths = torch.bincount(number)
    if as_nested:
        sizes = lengths.tolist()
        kept = _at(given, torch.unravel_index(frames, shape), len(frames))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its prototype, which TorchRL's users ask for
            nested: TensorDict = kept.apply(
                lambda leaf: torch.nested.nested_tensor(list(leaf.split(sizes)), layout=torch.strided),
                batch_size=[len(sizes), -1],
            )
        return nested
    mask_key: Key = "mask" if isinstance(trajectory_key, str) else (*trajectory_key[:-1], "mask")
    return _pad(given, shape, frames, lengths, mask_key=mask_key)


def _begins(batch: TensorDictBase, valid: Tensor | None, trajectory_key: Key) -> Tensor:
    """`[*, T]` bool: True on the first frame of each piece."""
    if trajectory_key in batch.keys(True):
        told = flag(batch, trajectory_key)
        changes = told[..., 1:] != told[..., :-1]
    else:
        told = flag(batch, ("next", "done"))
        changes = told[..., :-1]
    begins = torch.ones_like(told, dtype=torch.bool)
    if valid is None:
        begins[..., 1:] = changes
        return begins
    begins[..., 1:] = changes | ~valid[..., :-1]
    return begins & valid


def _pad(batch: TensorDictBase, shape: torch.Size, frames: Tensor, lengths: Tensor, *, mask_key: Key) -> TensorDict:
    count, longest = len(lengths), int(lengths.max())
    position = torch.arange(longest, device=frames.device)
    mask = position < lengths.unsqueeze(-1)
    if longest == shape[-1] and len(frames) == count * longest == shape.numel():
        result: TensorDict = batch.reshape(count, longest)
    else:
        # A padded place reads the last frame of its piece, and is zeroed after.
        begins = lengths.cumsum(0) - lengths
        source = frames[begins.unsqueeze(-1) + position.minimum((lengths - 1).unsqueeze(-1))]
        rows = torch.unravel_index(source.reshape(-1), shape)
        result = _at(batch, rows, count * longest).reshape(count, longest)
        result = blanked(result, ~mask)
    result[mask_key] = result[MASK] = mask
    result.names = [None, "time"]
    return result


def _at(batch: TensorDictBase, rows: tuple[Tensor, ...], count: int) -> TensorDict:
    """Frames at these indices: one copy a leaf, whatever its strides."""
    piece: TensorDict = batch.apply(lambda leaf: leaf[rows], batch_size=[count])
    return piece


def blanked(batch: TensorDictBase, padding: Tensor) -> TensorDict:
    """A batch `[N, T]` with zeros, written in place, where `padding` is True."""

    def zeroed(leaf: Tensor) -> Tensor:
        where = padding.reshape(*padding.shape, *(1,) * (leaf.ndim - padding.ndim))
        return signed(leaf).masked_fill_(where, 0).view(leaf.dtype)

    found: TensorDict = batch.apply(zeroed)
    return found


def signed(leaf: Tensor) -> Tensor:
    """A view of the same bits, for what torch cannot do with unsigned numbers of 16 bits and more: fill and scatter."""
    return leaf.view(_SIGNED.get(leaf.dtype, leaf.dtype))


def leaf_of(batch: TensorDictBase, key: Key) -> Tensor:
    """Raises PostprocError where the batch has no such leaf."""
    value: Tensor | None = batch.get(key, None)
    if value is None:
        raise PostprocError(f"the batch has no {_name(key)}; it has {sorted(map(_name, batch.keys(True, True)))}")
    return value


def flag(batch: TensorDictBase, key: Key) -> Tensor:
    """A bool or id leaf as `[*, T]`, without a trailing dimension of 1. Raises PostprocError where it has none."""
    value = leaf_of(batch, key)
    if tuple(value.shape) == (*batch.batch_size, 1):
        value = value.squeeze(-1)
    if tuple(value.shape) != tuple(batch.batch_size):
        raise PostprocError(
            f"{_name(key)} has shape {list(value.shape)} and the batch {list(batch.batch_size)}; "
            "expected one value per frame, with or without a trailing dimension of 1"
        )
    return value


def valid_frames(batch: TensorDictBase) -> Tensor | None:
    """`[*, T]` bool, True on frames; None when nothing is padded."""
    if batch.batch_dims == 0:
        raise PostprocError("the batch has no dimensions; its last one must be time, [*, T]")
    if -1 in batch.batch_size:
        raise PostprocError("the batch is nested; split it without as_nested, which pads trajectories")
    if MASK not in batch.keys(True):
        return None
    if (mask := flag(batch, MASK)).dtype != torch.bool:
        raise PostprocError(f"{_name(MASK)} is {mask.dtype}; expected torch.bool, True on frames")
    return mask


def frames_of(batch: TensorDict) -> TensorDict:
    """Flatten a batch `[B, T]` to frames `[N]`, environment by environment, without padding and mask.

    buffer.extend(frames_of(batch))  # of TorchRL's ReplayBuffer
    """
    valid = valid_frames(batch)
    flat: TensorDict = batch.reshape(-1)
    if valid is None:
        return flat
    kept: TensorDict = flat[valid.reshape(-1)].exclude(MASK)
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
