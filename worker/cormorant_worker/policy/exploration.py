"""TorchRL's exploration types, set around a batch.

TorchRL's and tensordict's modules read the type from tensordict; the built-in policies read it here. tensordict is
updated only if it has been imported: importing it takes seconds, and a worker with a plain module does not need it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from typing import Any


class ExplorationType(StrEnum):
    """How an action is chosen from the policy's distribution."""

    RANDOM = "random"
    """Draw from it."""
    MODE = "mode"
    """Its most likely action."""
    MEAN = "mean"
    """Its mean; the mode where the action is discrete."""
    DETERMINISTIC = "deterministic"
    """The distribution's own choice of a best action."""


_in_force = ExplorationType.RANDOM
_THEIRS = "tensordict.nn.probabilistic"
"""Where they are defined: what `tensordict.nn` itself exports of them differs between releases."""


def is_greedy() -> bool:
    """True if the type in force, ours or that of TorchRL's `set_exploration_type`, asks for the best action."""
    if (theirs := sys.modules.get(_THEIRS)) is not None:
        asked = theirs.interaction_type()
        return asked is not None and asked is not theirs.InteractionType.RANDOM
    return _in_force is not ExplorationType.RANDOM


@contextmanager
def exploring(exploration: ExplorationType) -> Iterator[None]:
    """Set the type within the block, here and for tensordict's modules. Not thread-safe."""
    global _in_force
    before, _in_force = _in_force, exploration
    theirs: Any = sys.modules.get(_THEIRS)
    try:
        with theirs.set_interaction_type(theirs.InteractionType[exploration.name]) if theirs else nullcontext():
            yield
    finally:
        _in_force = before
