"""Rejects invalid actions once per vector step. EnvPool silently accepts NaN and out-of-range numbers."""

from collections.abc import Callable

import gymnasium
import numpy as np

from cormorant_worker.errors import InvalidAction, PolicyMismatch
from cormorant_worker.spaces import Array, Arrays, OneHot, Space, leaf_spaces, leaves

_Check = Callable[[Array], bool]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""By bytes."""
_largest = np.maximum.reduce
"""The function behind `max` of an array."""


class ActionCheck:
    """Checks a batch of actions against one action space: dtype and shape once, values at every step."""

    def __init__(self, space: Space) -> None:
        self.leaves = leaves(space, ("action",))
        self._parts = leaf_spaces(space)
        self._checks = tuple(_value_check(part) for part in self._parts)

    def fit(self, actions: Arrays, num_envs: int) -> None:
        """Refuse actions whose shape or dtype does not fit this space."""
        if len(actions) != len(self.leaves):
            raise PolicyMismatch(
                f"the policy returned {len(actions)} action arrays, the action space has {len(self.leaves)}: "
                f"{', '.join('.'.join(leaf.key) for leaf in self.leaves)}"
            )
        for leaf, part, action in zip(self.leaves, self._parts, actions, strict=True):
            kind, wanted = action.dtype.kind, (num_envs, *leaf.shape)
            fits = kind in ("iub" if leaf.dtype.kind in "iub" else "fiu")
            if action.shape != wanted or not (fits or (kind == "f" and bool((action == np.trunc(action)).all()))):
                raise PolicyMismatch(
                    f"the policy's {'.'.join(leaf.key)} is {action.dtype.name} of shape {action.shape}, its space says "
                    f"{leaf.dtype.name} of shape {wanted}; return values of {part}"
                )

    def holds(self, actions: Arrays) -> bool:
        """Whether `values` would accept them."""
        return all(check(action) for check, action in zip(self._checks, actions, strict=True))

    def values(self, actions: Arrays, consequence: str = "no environment was stepped") -> None:
        """Refuse NaN, infinite and out-of-range values, in a sentence that ends with the `consequence`.

        A Box action outside its bounds is left to the environment (most clip), but it must be finite.
        """
        for i, check in enumerate(self._checks):
            if not check(action := actions[i]):
                bad = [row for row in range(len(action)) if not check(action[row : row + 1])]
                is_nan = action.dtype.kind == "f" and bool(np.isnan(action[bad[0]]).any())
                why = "NaN: look for NaN in its weights and in what it saw" if is_nan else f"outside {self._parts[i]}"
                raise InvalidAction(
                    f"the policy's {'.'.join(self.leaves[i].key)} for environment {bad[0]} is "
                    f"{action[bad[0]].tolist()} ({len(bad)} of {len(action)} environments), {why}; {consequence}"
                )


def _value_check(space: Space) -> _Check:
    match space:
        case gymnasium.spaces.Discrete():
            first, count = int(space.start), int(space.n)
            # Below `first` wraps to a huge unsigned number: one comparison serves both bounds.
            return lambda a: bool(_largest((a - first if first else a).view(_UNSIGNED[a.itemsize])) < count)
        case gymnasium.spaces.MultiDiscrete():
            start, nvec = np.asarray(space.start), np.asarray(space.nvec)
            return lambda a: bool(((a >= start) & (a < start + nvec)).all())
        case OneHot():
            return lambda a: bool(((a == 0) | (a == 1)).all() and (a.sum(-1) == 1).all())
        case gymnasium.spaces.MultiBinary():
            return lambda a: bool(((a == 0) | (a == 1)).all())
        case gymnasium.spaces.Box() if np.dtype(space.dtype).kind in "iu":
            return lambda a: bool(((a >= space.low) & (a <= space.high)).all())
        case gymnasium.spaces.Box() if np.dtype(space.dtype).kind == "f":
            # A sum is finite unless a term is not, or it overflows: only then look at each value.
            return lambda a: bool(np.isfinite(a.sum())) or bool(np.isfinite(a).all())
    return lambda a: True
