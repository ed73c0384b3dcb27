"""Capacity of a replay buffer, read from TorchRL's attributes. Called by the compatibility layers before anything is
stepped.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRoom:
    max_frames: int | None
    """None where it is unknown: buffers of other kinds, and those of another process."""
    is_wide: bool
    """The storage has two dimensions or more: it takes batches `[B, T]`, no single frames."""


def room_of(buffer: Any) -> BufferRoom:
    storage = getattr(buffer, "_storage", None)
    found = getattr(storage, "max_size", None)
    return BufferRoom(
        max_frames=found if isinstance(found, int) else None, is_wide=int(getattr(storage, "ndim", 1)) > 1
    )
