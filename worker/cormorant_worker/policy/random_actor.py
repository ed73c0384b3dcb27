"""Actions drawn from the space: the random policy, and warm-up frames of other policies."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import batch_space

from cormorant_worker.action_mask import find_masks, mask_length, masked_sampler
from cormorant_worker.policy.actor import Acted
from cormorant_worker.spaces import Array, Arrays, Leaf, OneHot, Space, leaf_spaces

_STEPS_AHEAD = 64


class RandomActor:
    """Draws uniformly from the action space, like gymnasium's `sample`, many steps at a time; only legal actions if the
    observation has an action mask or `illegal` is set.
    """

    def __init__(self, space: Space, seed: int, *, observation: Space | None = None) -> None:
        """`observation`: may have an action mask (`action_mask.py`)."""
        self.outputs: tuple[Leaf, ...] = ()
        self.states: tuple[Leaf, ...] = ()
        self.initial_states: Arrays = ()
        self.device = torch.device("cpu")
        self.generator = np.random.default_rng(seed)
        self._samplers = tuple(_sampler(part, self.generator) for part in leaf_spaces(space))
        self._chunk: Arrays = ()
        self._used = 0
        self.illegal: Array | None = None
        """[n, length] bool, for the next `act`: what `VectorEnv.illegal` says of its rows."""
        masks = [] if observation is None else find_masks(observation, space)
        self._masks_at = {i: at for i, at in enumerate(masks) if at >= 0}
        self.reads_masks = bool(self._masks_at)
        self._draw_legal = [masked_sampler(p, self.generator) if mask_length(p) else None for p in leaf_spaces(space)]

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        return Acted(tuple(self.choose(obs, len(is_init), range(len(self._samplers))).values()))

    def choose(self, obs: Arrays, n: int, of: Sequence[int]) -> dict[int, Array]:
        """Draw [n, ...] for some leaves of the action space, by their indices."""
        masks = {i: obs[self._masks_at[i]] for i in of if i in self._masks_at}
        if not masks and self.illegal is not None and self.illegal.any():
            masks = {0: ~self.illegal}
        legal = {i: draw(mask) for i, mask in masks.items() if (draw := self._draw_legal[i]) is not None}
        if len(legal) == len(of):
            return legal
        drawn = self._draw(n, 1)
        return {i: legal[i] if i in legal else drawn[i] for i in of}

    def act_steps(self, n: int, num_steps: int) -> Arrays:
        """[num_steps, n, ...] per leaf: what as many `act` would choose, without masks."""
        pieces = list[Arrays]()
        while num_steps:
            pieces.append(self._draw(n, num_steps))
            num_steps -= len(pieces[-1][0]) // n
        joined = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        return tuple(leaf.reshape(-1, n, *leaf.shape[1:]) for leaf in joined)

    def _draw(self, n: int, most: int) -> Arrays:
        """For n rows, the next steps of those that were drawn ahead, at least one and at most `most`."""
        if not self._chunk or self._used + n > len(self._chunk[0]):
            self._chunk, self._used = tuple(draw(max(n * _STEPS_AHEAD, 1)) for draw in self._samplers), 0
        start = self._used
        self._used += n * min((len(self._chunk[0]) - start) // n, most) if n else 0
        return tuple(leaf[start : self._used] for leaf in self._chunk)

    def reseed(self, seed: int) -> None:
        """Restart as a new actor with this seed would begin."""
        self.restore(dict(np.random.default_rng(seed).bit_generator.state))

    def state(self) -> dict[str, Any]:
        """The generator's state as plain JSON values. Actions drawn ahead are dropped."""
        self._chunk, self._used = (), 0
        return dict(self.generator.bit_generator.state)

    def restore(self, state: dict[str, Any]) -> None:
        self._chunk, self._used = (), 0
        self.generator.bit_generator.state = state


def _sampler(space: Space, generator: np.random.Generator) -> Callable[[int], Array]:
    """Gymnasium's own distribution for a leaf, drawn n at a time."""
    if isinstance(space, OneHot):
        vectors = np.eye(space.size, dtype=np.dtype(space.dtype))
        return lambda n: vectors[generator.integers(0, len(vectors), size=n)]

    @lru_cache(maxsize=1)
    def several(n: int) -> Space:
        spaces: Space = batch_space(space, n)
        spaces._np_random = generator  # spaces seed one of their own, and share none
        return spaces

    return lambda n: np.asarray(several(n).sample(), dtype=space.dtype)
