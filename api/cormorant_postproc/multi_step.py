"""Multi-step targets: rewards summed over n steps, and the frame n steps ahead as `next`.

Sutton 1988, Machine Learning 3(1):9-44. Keys are those of TorchRL's MultiStep; `MultiStep` documents the difference.

# T steps; n steps asked for, k <= n steps taken
"""

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from cormorant_postproc.pieces import PostprocError, at_steps, flag, last_step, valid_frames

_REWARD = ("next", "reward")


class MultiStep:
    """Sums rewards over `n_steps` and moves everything under `next` as far ahead.

    A frame looks k = min(n, steps left in its trajectory, steps left in the batch) steps ahead, its own included:

        rewards 1, gamma 0.5, n = 3, terminated at t = 3, T = 6
        t                    0     1     2    3    4    5
        next reward          1.75  1.75  1.5  1    1.5  1
        steps_to_next_obs    3     3     2    1    2    1
        next observation of  2     3     3    3    5    5
        next done            F     T     T    T    F    F

    So a target `reward + gamma * value(next) * ~terminated` never takes a value of a terminal observation: `done`,
    `terminated` and `truncated` move with the observation that they belong to. TorchRL leaves the flags where
    they were, so up to n - 1 steps before an end bootstrap from a terminal observation.

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
            PostprocError: a leaf is missing or its shape is not the batch's.
        """
        valid = valid_frames(batch)
        done = flag(batch, ("next", "done"))
        last = last_step(done, valid)
        step = torch.arange(done.shape[-1], device=done.device)
        ahead = (last - step).clamp_max(self.n_steps - 1)
        if valid is not None:
            ahead = torch.where(valid, ahead, 0)
        reward = batch.get(_REWARD, None)
        if reward is None or tuple(reward.shape[: done.ndim]) != tuple(done.shape):
            found = "is missing" if reward is None else f"has shape {list(reward.shape)}"
            raise PostprocError(
                f"next.reward {found}; expected one reward per frame, {list(done.shape)} or with further dimensions"
            )

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
