"""Values as scripts write them: numpy's scalars, and 0 or 1 where True or False is meant."""

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """A numpy scalar as Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def as_flag(value: Any, name: str) -> bool:
    """True or False.

    Raises:
        ValueError: neither of them, nor 0 or 1.
    """
    value = plain(value)
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} {value!r} is neither true nor false; give True or False")
    return bool(value)
