"""Vector environments of one row as single environments: evaluations play each episode in one of its own, so that it
depends on its seed alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np

from cormorant_worker.action_mask import ACTION_MASK
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.inline import InlineVectorEnv
from cormorant_worker.envs.protocol import EVERY_ROW, VectorEnv
from cormorant_worker.envs.request import EnvRequest
from cormorant_worker.spaces import Arrays, flatten, unflattener


class Reseeded(VectorEnv, Protocol):
    """A VectorEnv whose next `start` uses these seeds and options."""

    seeds: Sequence[int]
    options: dict[str, Any] | None = None
    """Options of the reset."""


class OneRow(gymnasium.Env[Any, Any]):
    """The only row of a vector environment."""

    def __init__(self, vector: Reseeded) -> None:
        self._vector = vector
        self.observation_space, self.action_space = vector.observation_space, vector.action_space
        self._nested = unflattener(self.observation_space)
        self._first: Arrays | None = None
        """The first observation of an episode that has begun already."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if seed is not None or options or self._first is None:
            self._vector.seeds = self._vector.seeds if seed is None else (seed,)
            self._vector.options = options
            self._first = self._vector.start()
        first, self._first = self._first, None
        return self._observation(first), self._mask()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step once."""
        flat = tuple([np.asarray(part)[None] for part in flatten(self.action_space, action)])
        while True:
            self._vector.send(flat, EVERY_ROW)
            step = self._vector.recv()
            if len(step.reward):  # else the row is held back until the step that resets it
                break
        if len(step.ended):
            self._first = tuple([leaf.copy() for leaf in step.obs])
        obs = self._observation(step.final if len(step.ended) else step.obs)
        info = {leaf.key[-1]: column[0] for leaf, column in zip(self._vector.info_leaves, step.info, strict=True)}
        return obs, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), self._mask() | info

    def close(self) -> None:
        """Close the vector environment."""
        self._vector.close()

    def _observation(self, obs: Arrays) -> Any:
        return self._nested([leaf[0].copy() for leaf in obs])

    def _mask(self) -> dict[str, Any]:
        return {} if self._vector.illegal is None else {ACTION_MASK: ~self._vector.illegal[0]}


class _Rows(EnvSource):
    def __init__(self, name: str, make: Callable[[], Reseeded]) -> None:
        self._name, self._make = name, make

    @property
    def name(self) -> str:
        return self._name

    def build(self, row: int) -> OneRow:  # the same for every row
        return OneRow(self._make())


def open_rows(
    request: EnvRequest, wrap: Callable[[EnvSource], EnvSource], name: str, make: Callable[[], Reseeded]
) -> VectorEnv:
    """One environment for each episode of an evaluation, in this process. `make`: returns a vector of one row."""
    return InlineVectorEnv(wrap(_Rows(name, make)), seeds=request.seeds, limits=request.limits, info=request.info)
