"""Action masks: which discrete actions are legal. They are the leaf `action_mask` of a Dict observation, as in
PettingZoo and TorchRL, or `info["action_mask"]`, as in gymnasium's Taxi: one number for each action, nonzero if it is
legal; those of a MultiDiscrete side by side. The actions of a group of agents are a MultiDiscrete, with one mask per
row.
"""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from cormorant_worker.spaces import Array, Leaf, OneHot, Rooted, Space, leaf_spaces, leaves, unflattener

ACTION_MASK = "action_mask"
_LONGEST_IN_INFO = 1 << 14
"""Masks in info are kept for every environment: of spaces with more actions they are not read."""


def mask_length(action: Space) -> int:
    """Length of an action space's mask; 0: the space has no mask."""
    match action:
        case gymnasium.spaces.Discrete():
            return int(action.n)
        case gymnasium.spaces.MultiDiscrete():
            return int(np.sum(action.nvec))
        case OneHot():
            return action.size
    return 0


def find_masks(observation: Space, action: Space) -> list[int]:
    """For each action leaf, the index of the observation leaf that is its mask; -1: none."""
    masks = [(i, leaf) for i, leaf in enumerate(leaves(observation, ("observation",))) if leaf.key[-1] == ACTION_MASK]

    def fits(mask: Leaf, leaf: Leaf, part: Space) -> bool:
        # Of several actions, each has its own beside it.
        is_its = part is action or mask.key[:-1] == leaf.key[:-1]
        return bool(is_its and np.prod(mask.shape) == mask_length(part) > 0)

    parts = zip(leaves(action, ("action",)), leaf_spaces(action), strict=True)
    return [next((i for i, mask in masks if fits(mask, *both)), -1) for both in parts]


def info_mask_length(observation: Space, action: Space) -> int:
    """Length of the mask in the info; 0: it is not read, for example because the observation contains the mask."""
    length = mask_length(action)
    return 0 if length > _LONGEST_IN_INFO or find_masks(observation, action)[0] >= 0 else length


def info_mask(info: Any, length: int) -> Array | None:
    """[length] the mask in an info, also as gymnasium's tuple of one mask for each part; None: the info contains no
    valid mask.
    """
    mask = info.get(ACTION_MASK) if isinstance(info, Mapping) else None
    if mask is None:
        return None
    try:
        array = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple) else np.asarray(mask)
    except (ValueError, TypeError):  # lists of different lengths, an empty tuple
        return None
    return array if array.shape == (length,) and array.dtype.kind in "biuf" else None


def masked_sampler(action: Space, generator: np.random.Generator) -> Callable[[Array], Array]:
    """Draw uniformly from the legal actions of each row of a mask [n, ...] of `mask_length` numbers; the first action
    if none is legal, as gymnasium does.
    """
    (part,) = leaf_spaces(action)

    def choose(mask: Array) -> Array:
        return np.asarray(np.where(mask != 0, generator.random(mask.shape), -1.0).argmax(-1))

    match part:
        case OneHot():
            vectors = np.eye(part.size, dtype=np.dtype(part.dtype))
            return lambda mask: vectors[choose(mask)]
        case gymnasium.spaces.MultiDiscrete():
            cuts = np.cumsum(np.ravel(part.nvec))[:-1]
            start, shape = np.asarray(part.start), part.shape

            def draw(mask: Array) -> Array:
                parts = np.split(mask.reshape(len(mask), -1), cuts, axis=-1)
                chosen = np.stack([choose(one) for one in parts], axis=-1)
                return np.asarray((start + chosen.reshape(len(mask), *shape)).astype(part.dtype))

            return draw
    return lambda mask: np.asarray((choose(mask) + int(part.start)).astype(part.dtype))  # type: ignore[attr-defined]  # Discrete


def legal_action(action: Space, obs: Any, info: Mapping[str, Any], *, seed: int) -> Any:
    """Draw an action that the mask in the info or observation of a reset allows; any action if there is no mask."""
    if isinstance(action, Rooted):  # each group of agents has its masks beside its observation
        masks = {name: {ACTION_MASK: tuple(obs[name][ACTION_MASK])} for name in action}
        return {
            name: {"action": legal_action(group["action"], masks[name], {}, seed=seed)}  # type: ignore[index]  # Dict
            for name, group in action.items()
        }
    length = mask_length(action)
    mask = info_mask(info, length)
    if mask is None:
        mask = info_mask(obs, length)
    if mask is None:
        action.seed(seed)
        return action.sample()
    drawn = masked_sampler(action, np.random.default_rng(seed))(mask[None])
    return unflattener(action)([drawn[0]])


class ObservedActionMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Moves `info["action_mask"]` into the observation, which policies see: a Dict of `observation` and `action_mask`.
    Use it as `spec.env.gymnasium.wrappers: [{entrypoint: "cormorant.wrappers:ObservedActionMask"}]`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        length = mask_length(env.action_space)
        self._all = np.ones(length, np.int8)
        self.observation_space = gymnasium.spaces.Dict(
            {"observation": env.observation_space, ACTION_MASK: gymnasium.spaces.MultiBinary(length)}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(obs, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(obs, info), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"observation": obs, ACTION_MASK: np.asarray(info.get(ACTION_MASK, self._all), np.int8)}
