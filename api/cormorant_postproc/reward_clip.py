"""Rewards cut to a range before they are stored, as for Atari games (Mnih et al. 2015, Nature 518)."""

from tensordict import TensorDict, TensorDictBase

from cormorant_postproc.protocol import PostprocError


class RewardClip:
    """Clamps `("next", "reward")` to `low..high`. Statistics of returns are made before it and are not clipped.

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
