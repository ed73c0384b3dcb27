"""Arguments as scripts give them to both layers: numpy's scalars, 0 or 1 for a flag, replay buffers of a capacity."""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRoom:
    """Capacity of a replay buffer, read from TorchRL's attributes."""

    max_frames: int | None
    """None where it is unknown: buffers of other kinds, and those of another process."""
    num_dims: int
    """Dimensions of the storage: with 2 it takes batches `[B, T]`, with 1 single frames."""


def room_of(buffer: Any) -> BufferRoom:
    storage = getattr(buffer, "_storage", None)
    found = getattr(storage, "max_size", None)
    return BufferRoom(max_frames=found if isinstance(found, int) else None, num_dims=int(getattr(storage, "ndim", 1)))
