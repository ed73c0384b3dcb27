"""Frame stacking on stored batches: the last n observations of a trajectory in place of the last one.

# B rows, T steps, n frames per stack, K trajectories that may continue
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from cormorant_postproc.pieces import TRAJ_IDS, Key, PostprocError, at_steps, first_step, flag, under

_KEPT_BATCHES = 1024


class FrameStack:
    """Stacks observations, oldest first, in a new dimension: `[B, T, ...]` becomes `[B, T, n, ...]`.

        observations a0 a1 a2 | b0 b1, n = 3
        observation       a0 a0 a0    a0 a0 a1    a0 a1 a2    b0 b0 b0    b0 b0 b1
        next observation  a0 a0 a1    a0 a1 a2    a1 a2 END   b0 b0 b1    b0 b1 ...

    A trajectory's first frame is repeated to fill its first stacks, as in gymnasium's `FrameStackObservation`. The past
    frames of a trajectory that continues in a later batch are kept by its id: one FrameStack may get the batches of
    several collectors, each collector's in order, split or not. The stack restarts after a frame that is done. If a
    trajectory began before the first batch, its oldest known frame is repeated. The past of a trajectory is forgotten
    after 1,024 batches without a frame of it: its collector has died.

    Args:
        num_frames: n, at least 1.
        keys: leaves to stack; `next` must have them, too.

    Raises:
        PostprocError: an argument is out of its range.
    """

    def __init__(self, num_frames: int, *, keys: Sequence[Key] = ("observation",)) -> None:
        if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
            raise PostprocError(f"num_frames {num_frames!r} is not a number of frames; use an integer of at least 1")
        if not keys:
            raise PostprocError('keys is empty; name the leaves to stack, for example keys=("observation",)')
        self.num_frames = num_frames
        self.keys = tuple(keys)
        self._open: TensorDict | None = None
        """Trajectories that may go on, [K], in rising order of `ids`; `known`: how many of their last frames; the batch
        in which each was last `seen`; `past` [K, n-1, ...]: their last frames, by leaf."""
        self._batches = 0

    def forget(self) -> None:
        """Forget all past frames, as before the first batch."""
        self._open = None

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Take a batch `[*, T]` with `("collector", "traj_ids")` and `("next", "done")`; see the class.

        Raises:
            PostprocError: a leaf is missing, or the batch has no time dimension.
        """
        if batch.batch_dims == 0:
            raise PostprocError("the batch has no dimensions; its last one must be time, [*, T]")
        if batch.batch_dims != 2:
            flat = self(batch.reshape(-1, batch.batch_size[-1]))
            shaped: TensorDict = flat.reshape(batch.batch_size)
            shaped.names = batch.names
            return shaped
        ids, done = flag(batch, TRAJ_IDS), flag(batch, ("next", "done"))
        lengths = torch.full_like(ids[:, 0], ids.shape[1], dtype=torch.int64)
        if ("collector", "mask") in batch.keys(True):
            lengths = flag(batch, ("collector", "mask")).sum(-1)
        before, past = self._open, self.num_frames - 1
        at = known = torch.zeros_like(ids[:, 0])
        goes_on = torch.zeros_like(at, dtype=torch.bool)
        if before is not None:
            # Where these stand, or would.
            at = torch.searchsorted(before["ids"], ids[:, 0].contiguous()).clamp(max=len(before) - 1)
            goes_on = (before["ids"][at] == ids[:, 0]) & (lengths > 0)
            known = torch.where(goes_on, before["known"][at], 0)

        # Step t of the batch is step t + past here; a trajectory that goes on begins that many steps earlier.
        first = first_step(ids) + past
        first = torch.where(first == past, past - known.unsqueeze(-1), first)
        step = torch.arange(ids.shape[1], device=ids.device) + past

        result: TensorDict = batch.copy()
        result["next"] = batch["next"].copy()
        at_end = (lengths - 1).clamp_min(0).unsqueeze(-1)
        held = (lengths.unsqueeze(-1) - 1 + past - at_steps(first, at_end) + 1).squeeze(-1).clamp(max=past)
        rows = TensorDict({"ids": at_steps(ids, at_end).squeeze(-1), "known": held}, [len(ids)])
        for key in self.keys:
            tail = self._stack(result, batch, key, at=at, first=first, step=step, lengths=lengths)
            rows[under("past", key)] = tail
        self._batches += 1
        rows["seen"] = torch.full_like(held, self._batches)
        stays_open = (lengths > 0) & ~at_steps(done, at_end).squeeze(-1)
        left_open: TensorDict = rows[stays_open.nonzero().squeeze(-1)]
        if before is not None:
            stays = before["seen"] + _KEPT_BATCHES > self._batches
            stays[at[goes_on]] = False
            left_open = torch.cat([left_open, before[stays.nonzero().squeeze(-1)]])
        self._open = left_open[left_open["ids"].argsort()] if len(left_open) else None
        return result

    def _stack(
        self,
        result: TensorDict,
        batch: TensorDictBase,
        key: Key,
        *,
        at: Tensor,
        first: Tensor,
        step: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Stack one leaf. Returns the last frames of each row, [B, n-1, ...]."""
        under_next = under("next", key)
        observation, following = batch.get(key, None), batch.get(under_next, None)
        if observation is None or following is None:
            missing = key if observation is None else under_next
            raise PostprocError(f"the batch has no {missing}; name leaves that it also has under `next`")
        past = self.num_frames - 1
        if self._open is None:
            before = observation.new_zeros(len(observation), past, *observation.shape[2:])
        else:
            before = self._open[under("past", key)][at]
        series = torch.cat([before, observation], dim=1)
        picks = [torch.maximum(step - back, first) for back in range(past, -1, -1)]
        result[key] = torch.stack([at_steps(series, pick) for pick in picks], dim=2)
        # What followed a frame is one step later than the frame: all but the newest are frames of the series.
        later = [at_steps(series, pick) for pick in picks[1:]]
        result[under_next] = torch.stack([*later, following], dim=2)
        # The last frames of each row, which may be shorter than the batch.
        index = lengths.unsqueeze(-1) + torch.arange(past, device=step.device)
        return at_steps(series, index)
