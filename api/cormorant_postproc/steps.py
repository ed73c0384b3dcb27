"""Steps of post-processing: callables that take a batch and return a new one, the pipeline of them, and a manifest's.

# B rows, T steps, n steps asked for or frames per stack, k <= n steps taken
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from cormorant_postproc.pieces import (
    TRAJ_IDS,
    Key,
    Postproc,
    PostprocError,
    at_steps,
    first_step,
    flag,
    last_step,
    leaf_of,
    split_trajectories,
    under,
    valid_frames,
)

_REWARD = ("next", "reward")
_KEPT_BATCHES = 1024


class Pipeline:
    """Applies one step after another.

    Pipeline([RewardClip(), MultiStep(gamma=0.99, n_steps=3)])
    """

    def __init__(self, steps: Sequence[Postproc]) -> None:
        self.steps = tuple(steps)

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Apply all steps to the batch; without steps, return a shallow copy."""
        result: TensorDict = batch.copy() if not self.steps else batch
        for step in self.steps:
            result = step(result)
        return result


def of_collection(settings: Mapping[str, Any]) -> Pipeline:
    """Pipeline of `Collection.post_processing`, plain data: multi-step targets, then trajectories, then dtypes."""
    steps: list[Postproc] = []
    if (multi_step := settings.get("multi_step")) is not None:
        steps.append(MultiStep(gamma=multi_step["gamma"], n_steps=multi_step["steps"]))
    if settings.get("split_trajectories"):
        steps.append(split_trajectories)
    if keys := settings.get("bfloat16"):
        steps.append(partial(in_bfloat16, keys=keys))
    return Pipeline(steps)


class RewardClip:
    """Clamps `("next", "reward")` to `low..high`; after `MultiStep`, the sums. Statistics of returns are not clipped.

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
        result: TensorDict = batch.copy()
        result[_REWARD] = leaf_of(batch, _REWARD).clamp(self.low, self.high)
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


def _refuse_joined(batch: TensorDictBase) -> None:
    if batch.get("steps_to_next_obs", None) is not None:
        raise PostprocError(
            "the batch has steps_to_next_obs: its steps were joined before; apply MultiStep once, after FrameStack, or "
            "leave it to collection.multiStep"
        )


def _refuse_mixed(batch: TensorDictBase, done: Tensor, valid: Tensor | None) -> None:
    """Raise PostprocError where `[T]` frames are those of several environments, or shuffled."""
    if batch.batch_dims == 1 and TRAJ_IDS in batch.keys(True):
        ids = flag(batch, TRAJ_IDS)
        changes = (ids[1:] != ids[:-1]) & ~done[:-1]
        if (changes if valid is None else changes & valid[1:]).any():
            raise PostprocError(
                f"the batch {list(batch.batch_size)} is not one environment's time: its trajectory changes where none "
                "ends; pass a batch [B, T] before frames_of, or the trajectories() of a dataset in place of frames()"
            )


class MultiStep:
    """Sums rewards over `n_steps` and moves everything under `next` as far ahead: Sutton 1988, Machine Learning 3:9-44.

    A frame looks k = min(n, steps left in its trajectory, steps left in the batch) steps ahead, its own included:

        rewards 1, gamma 0.5, n = 3, terminated at t = 3, T = 6
        t                    0     1     2    3    4    5
        next reward          1.75  1.75  1.5  1    1.5  1
        steps_to_next_obs    3     3     2    1    2    1
        next observation of  2     3     3    3    5    5
        next done            F     T     T    T    F    F

    So a target `reward + gamma * value(next) * ~terminated` never takes a value of a terminal observation: `done`,
    `terminated` and `truncated` move with the observation that they belong to. TorchRL's MultiStep, whose keys these
    are, leaves the flags where they were, so up to n - 1 steps before an end bootstrap from a terminal observation.

    Of groups of agents, no frame looks past the truncation of one of them, whose value is taken of its last
    observation, or over a gap from which one comes back.

    Args:
        gamma: discount of one step, above 0 and at most 1.
        n_steps: at least 1; 1 changes no value.

    Raises:
        PostprocError: an argument is out of its range.
    """

    def __init__(self, gamma: float, n_steps: int) -> None:
        if not 0 < gamma <= 1:
            raise PostprocError(f"gamma {gamma} is out of range; use a discount above 0 and at most 1")
        if isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < 1:
            raise PostprocError(f"n_steps {n_steps!r} is not a number of steps; use an integer of at least 1")
        self.gamma = gamma
        self.n_steps = n_steps

    def to(self, *_: object, **__: object) -> "MultiStep":
        """Return self: it computes on the batch's device. For scripts that move TorchRL's module to a device."""
        return self

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Process a batch `[*, T]` with `("next", "reward")` and `("next", "done")`. Copies the leaves of `next`.

        Returns:
            A batch of the same shape, with

            - `("next", "reward")`: the discounted sum over k steps; `("next", "original_reward")` what it was;
            - every other leaf of `next`, `done`, `terminated` and `truncated` among them, as it is k - 1 steps ahead;
            - `steps_to_next_obs` int64 `[*, T]`: k; `gamma` float `[*, T]`: gamma to the power of k, by which a value
                of the next observation is to be discounted;
            - `nonterminal` bool `[*, T]`: whether such a value may be taken: False where the frame that is looked at
                is terminated (done, in a batch without `terminated`), and on padding.

            Padding (`("collector", "mask")` False) stays as it is.

        Raises:
            PostprocError: a leaf is missing, its shape is not the batch's, a MultiStep was applied before, or `[T]`
                frames are of several environments by their `("collector", "traj_ids")`.
        """
        _refuse_joined(batch)
        valid = valid_frames(batch)
        done = flag(batch, ("next", "done"))
        _refuse_mixed(batch, done, valid)
        last = last_step(done | _ends_of_agents(batch["next"], done), valid)
        step = torch.arange(done.shape[-1], device=done.device)
        ahead = (last - step).clamp_max(self.n_steps - 1)
        if valid is not None:
            ahead = torch.where(valid, ahead, 0)
        reward = leaf_of(batch, _REWARD)
        result: TensorDict = batch.copy()
        following = batch["next"].exclude("reward")
        moved = following.apply(lambda leaf: at_steps(leaf, step + ahead))
        moved["original_reward"] = reward
        dtype = reward.dtype if reward.dtype.is_floating_point else torch.get_default_dtype()
        moved["reward"] = self._sums(reward.to(dtype), last - step, valid)
        result["next"] = moved
        result["steps_to_next_obs"] = ahead + 1
        result["gamma"] = torch.pow(self.gamma, (ahead + 1).to(dtype))
        ends = ("next", "terminated") if ("next", "terminated") in batch.keys(True) else ("next", "done")
        may = ~flag(result, ends)
        result["nonterminal"] = may if valid is None else may & valid
        return result

    def _sums(self, reward: Tensor, left: Tensor, valid: Tensor | None) -> Tensor:
        """Discounted sums over `n_steps` frames.

        Args:
            reward: `[*, T, ...]`.
            left: `[*, T]` frames that follow within the piece.
            valid: frames that are none keep their reward.
        """
        time = left.ndim - 1
        extra = (1,) * (reward.ndim - left.ndim)
        steps = left.shape[-1]
        summed = reward.clone()
        for by in range(1, min(self.n_steps, steps)):
            ends_before = (left < by).narrow(time, 0, steps - by)
            ends_before = ends_before.reshape(*ends_before.shape, *extra)
            # Filled and not multiplied: what lies past an end may be infinite.
            later = reward.narrow(time, by, steps - by).masked_fill(ends_before, 0)
            summed.narrow(time, 0, steps - by).add_(later, alpha=self.gamma**by)
        if valid is None:
            return summed
        return torch.where(valid.reshape(*valid.shape, *extra), summed, reward)


def _ends_of_agents(following: TensorDictBase, done: Tensor) -> Tensor:
    """`[*, T]` bool: frames that truncate an agent, and the last ones before a frame that brings one back."""
    ends, goes_on = torch.zeros_like(done), ~done[..., :-1, None]
    for part in following.values():
        if is_tensor_collection(part) and {"mask", "done", "truncated"} <= set(part.keys()):
            gone, truncated = (part[name].flatten(done.ndim) for name in ("done", "truncated"))
            stays_gone = gone[..., :-1, :] & goes_on
            ends[..., :-1] |= (stays_gone & ~gone[..., 1:, :]).any(-1)
            ends[..., :1] |= truncated[..., :1, :].any(-1)
            ends[..., 1:] |= (truncated[..., 1:, :] & ~stays_gone).any(-1)
    return ends


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

    It does not see that a batch is missing, and stacks the frames before and after it. Where several consumers share
    the batches, or stale or old ones are dropped, stack in the environment, or call `forget` before each batch.

    Args:
        num_frames: n, at least 1.
        keys: leaves to stack; `next` must have them, too.

    Raises:
        PostprocError: an argument is out of its range.
    """

    def __init__(self, num_frames: int, *, keys: Sequence[Key] = ("observation",)) -> None:
        if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
            raise PostprocError(f"num_frames {num_frames!r} is not a number of frames; use an integer of at least 1")
        if not keys or isinstance(keys, str):
            raise PostprocError(f'keys is {keys!r}; name the leaves to stack, for example keys=("observation",)')
        self.num_frames = num_frames
        self.keys = tuple(keys)
        self._open: dict[int, tuple[int, list[Tensor]]] = {}
        """By id, trajectories that may go on: the batch in which each was last seen, and its last frames, [n-1, ...] of
        each key, the oldest one repeated."""
        self._batches = 0

    def forget(self) -> None:
        """Forget all past frames, as before the first batch."""
        self._open.clear()

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Take a batch `[*, T]` with `("collector", "traj_ids")` and `("next", "done")`; see the class.

        Raises:
            PostprocError: a leaf is missing, the batch has no time dimension, a MultiStep was applied before, or `[T]`
                frames are of several environments.
        """
        _refuse_joined(batch)
        valid = valid_frames(batch)
        if batch.batch_dims != 2:
            _refuse_mixed(batch, flag(batch, ("next", "done")), valid)
            flat = self(batch.reshape(-1, batch.batch_size[-1]))
            shaped: TensorDict = flat.reshape(batch.batch_size)
            shaped.names = batch.names
            return shaped
        ids, done = flag(batch, TRAJ_IDS), flag(batch, ("next", "done"))
        lengths = torch.full_like(ids[:, 0], ids.shape[1], dtype=torch.int64) if valid is None else valid.sum(-1)
        at_end = (lengths - 1).clamp_min(0).unsqueeze(-1)
        begins = ids[:, 0].tolist()
        goes_on = {
            row: self._open[begins[row]][1] for row in lengths.nonzero().flatten().tolist() if begins[row] in self._open
        }

        # Step t of the batch is step t + past of a row's series, which begins with the past of its first trajectory.
        past = self.num_frames - 1
        first = first_step(ids)
        first = torch.where(first > 0, first + past, 0)
        step = torch.arange(ids.shape[1], device=ids.device) + past
        picks = [torch.maximum(step - back, first) for back in range(past, -1, -1)]
        result: TensorDict = batch.copy()
        result["next"] = batch["next"].copy()
        tails = []
        for place, key in enumerate(self.keys):
            observation, following = leaf_of(batch, key), leaf_of(batch, under("next", key))
            series = torch.cat([*[observation[:, :1]] * past, observation], dim=1)
            if goes_on:
                series[[*goes_on], :past] = torch.stack([kept[place] for kept in goes_on.values()])
            result[key] = stacks = torch.stack([at_steps(series, pick) for pick in picks], dim=2)
            # What followed a frame is one step later than the frame: all but the newest are frames of its stack.
            result[under("next", key)] = torch.cat([stacks[:, :, 1:], following.unsqueeze(2)], dim=2)
            tails.append(at_steps(stacks, at_end)[:, 0, 1:])

        for row in goes_on:
            self._open.pop(begins[row], None)
        self._batches += 1
        stays_open = ((lengths > 0) & ~at_steps(done, at_end).squeeze(-1)).tolist()
        numbers = at_steps(ids, at_end).squeeze(-1).tolist()
        for number, is_open, *kept in zip(numbers, stays_open, *tails, strict=True):
            if is_open:
                self._open[number] = self._batches, [tail.clone() for tail in kept]
        oldest = self._batches - _KEPT_BATCHES
        self._open = {number: kept for number, kept in self._open.items() if kept[0] > oldest}
        return result
