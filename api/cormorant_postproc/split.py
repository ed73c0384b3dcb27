"""Batches `[*, T]` cut into trajectories, in time that grows with the frames and not with the trajectories.

# N pieces, M frames, T steps
"""

import warnings

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from cormorant_postproc.pieces import MASK, TRAJ_IDS, Key, PostprocError, flag, under, valid_frames


def split_trajectories(
    batch: TensorDictBase,
    *,
    trajectory_key: Key = TRAJ_IDS,
    done_key: Key = "done",
    prefix: str | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDict:
    """Cut a batch into its pieces of trajectories.

        traj_ids  0 0 0 1 1      ->      padded   a0 a1 a2    mask  T T T
                  2 2 2 2 3              [4, 4]   a3 a4             T T F
                                                  b0 b1 b2 b3       ...
                                                  b4

    Pieces are ordered by row, then by time. A piece ends where the id changes, where its row does (two rows
    with the same id are two pieces), and where padding begins.

    Args:
        batch: `[*, T]`. Frames whose `("collector", "mask")` is False are left out.
        trajectory_key: key of the trajectory ids, one per frame. If the batch has none, pieces are numbered by
            `("next", done_key)`, and the numbers are stored under this key.
        done_key: leaf under `next` that marks ends.
        prefix: as in TorchRL: ids are `(prefix, "traj_ids")`, in place of `trajectory_key`.
        as_nested: as in TorchRL: True returns `[N, -1]` with strided nested tensors; or the torch layout to use.

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
    begins = _begins(given, valid, trajectory_key, done_key)
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
        layout, sizes = torch.strided if as_nested is True else as_nested, lengths.tolist()
        kept = _at(given, torch.unravel_index(frames, shape), len(frames))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its prototype, which TorchRL's users ask for
            nested: TensorDict = kept.apply(
                lambda leaf: torch.nested.nested_tensor(list(leaf.split(sizes)), layout=layout),
                batch_size=[len(sizes), -1],
            )
        return nested
    mask_key: Key = "mask" if isinstance(trajectory_key, str) else (*trajectory_key[:-1], "mask")
    return _pad(given, shape, frames, lengths, mask_key=mask_key)


def _begins(batch: TensorDictBase, valid: Tensor | None, trajectory_key: Key, done_key: Key) -> Tensor:
    """`[*, T]` bool: True on the first frame of each piece."""
    if trajectory_key in batch.keys(True):
        told = flag(batch, trajectory_key)
        changes = told[..., 1:] != told[..., :-1]
    else:
        told = flag(batch, under("next", done_key))
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
        padding = ~mask
        result = result.apply(
            lambda leaf: leaf.masked_fill_(padding.reshape(*padding.shape, *(1,) * (leaf.ndim - padding.ndim)), 0)
        )
    result[mask_key] = mask
    result.names = [None, "time"]
    return result


def _at(batch: TensorDictBase, rows: tuple[Tensor, ...], count: int) -> TensorDict:
    """Frames at these indices: one copy a leaf, whatever its strides."""
    found: TensorDict = batch.apply(lambda leaf: leaf[rows], batch_size=[count])
    return found
