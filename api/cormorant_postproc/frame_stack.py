"""The last n observations of a trajectory in place of the last one, stacked where batches are stored.

# B rows, T steps, n frames a stack
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from cormorant_postproc.pieces import TRAJ_IDS, Key, at_steps, first_step, flag
from cormorant_postproc.protocol import PostprocError


class FrameStack:
    """Stacks observations, oldest first, in a new dimension: `[B, T, ...]` becomes `[B, T, n, ...]`.

        observations a0 a1 a2 | b0 b1, n = 3
        observation       a0 a0 a0    a0 a0 a1    a0 a1 a2    b0 b0 b0    b0 b0 b1
        next observation  a0 a0 a1    a0 a1 a2    a1 a2 END   b0 b0 b1    b0 b1 ...

    Before a trajectory's first frame stands that frame again, as in gymnasium's `FrameStackObservation`. A trajectory
    that goes on in the next batch keeps its past: give one collector's batches, in order, to one FrameStack. For a
    trajectory that was under way before the first batch, the oldest known frame stands for what is not known.

    Args:
        num_frames: n, at least 1.
        keys: leaves to stack, each of which `next` has, too.

    Raises:
        PostprocError: an argument is out of its range.
    """

    def __init__(self, num_frames: int, *, keys: Sequence[Key] = ("observation",)) -> None:
        if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
            raise PostprocError(f"num_frames {num_frames!r} is not a number of frames; give an integer of 1 or more")
        if not keys:
            raise PostprocError('keys is empty; name the leaves to stack, for example keys=("observation",)')
        self.num_frames = num_frames
        self.keys = tuple(keys)
        self._past: dict[Key, Tensor] = {}
        """[B, n-1, ...] the last frames of each row, by leaf."""
        self._known: Tensor | None = None
        """[B] int64: how many of them belong to the row's trajectory."""
        self._ids: Tensor | None = None
        """[B] the trajectory that they belong to."""

    def forget(self) -> None:
        """The next batch follows on nothing."""
        self._past, self._known, self._ids = {}, None, None

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Take a batch `[B, T]` or `[T]` with `("collector", "traj_ids")`; see the class.

        Raises:
            PostprocError: a leaf is missing, or the batch has another number of rows than the last one.
        """
        if batch.batch_dims == 1:
            only: TensorDict = self(batch.unsqueeze(0)).squeeze(0)
            return only
        if batch.batch_dims != 2:
            raise PostprocError(f"the batch has shape {list(batch.batch_size)}; FrameStack takes [B, T] or [T]")
        ids = flag(batch, TRAJ_IDS)
        past = self.num_frames - 1
        if self._ids is not None and len(self._ids) != len(ids):
            raise PostprocError(
                f"the batch has {len(ids)} rows and the last one had {len(self._ids)}; use one FrameStack a collector"
            )
        known = torch.zeros_like(ids[:, 0])
        if self._ids is not None and self._known is not None:
            known = torch.where(self._ids == ids[:, 0], self._known, 0)

        begins = torch.zeros_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        # Step t of the batch is step t + past here; a trajectory that goes on begins that many steps earlier.
        first = first_step(begins) + past
        first = torch.where(first == past, past - known.unsqueeze(-1), first)
        step = torch.arange(ids.shape[1], device=ids.device) + past

        result: TensorDict = batch.copy()
        result["next"] = batch["next"].copy()
        lengths = self._lengths(batch)
        for key in self.keys:
            self._stack(result, batch, key, first=first, step=step, lengths=lengths)
        at_end = (lengths - 1).clamp_min(0).unsqueeze(-1)
        held = (lengths.unsqueeze(-1) - 1 + past - at_steps(first, at_end) + 1).squeeze(-1)
        has_frames = lengths > 0
        old_ids = ids[:, 0] if self._ids is None else self._ids
        old_known = known if self._known is None else self._known
        self._ids = torch.where(has_frames, at_steps(ids, at_end).squeeze(-1), old_ids)
        self._known = torch.where(has_frames, held.clamp(max=past), old_known)
        return result

    def _stack(
        self, result: TensorDict, batch: TensorDictBase, key: Key, *, first: Tensor, step: Tensor, lengths: Tensor
    ) -> None:
        under_next: Key = ("next", key) if isinstance(key, str) else ("next", *key)
        observation, following = batch.get(key, None), batch.get(under_next, None)
        if observation is None or following is None:
            missing = key if observation is None else under_next
            raise PostprocError(f"the batch has no {missing}; name leaves that it has under `next`, too")
        past = self.num_frames - 1
        before = self._past.get(key)
        if before is None:
            before = observation.new_zeros(len(observation), past, *observation.shape[2:])
        series = torch.cat([before, observation], dim=1)
        picks = [torch.maximum(step - back, first) for back in range(past, -1, -1)]
        result[key] = torch.stack([at_steps(series, pick) for pick in picks], dim=2)
        # What followed a frame is one step later than the frame: all but the newest are frames of the series.
        later = [at_steps(series, pick) for pick in picks[1:]]
        result[under_next] = torch.stack([*later, following], dim=2)
        # The last frames of each row, which may be shorter than the batch.
        index = lengths.unsqueeze(-1) + torch.arange(past, device=step.device)
        self._past[key] = at_steps(series, index)

    def _lengths(self, batch: TensorDictBase) -> Tensor:
        if ("collector", "mask") in batch.keys(True):
            return flag(batch, ("collector", "mask")).sum(-1)
        rows, steps = batch.batch_size
        return torch.full((rows,), steps, device=flag(batch, TRAJ_IDS).device)
