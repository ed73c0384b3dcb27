"""State files: written by `save` and read by `restore` of every fleet."""

import os
from pathlib import Path

from cormorant_contract.disk import write_durably
from cormorant_contract.errors import StateError

State = bytes | memoryview | str | os.PathLike[str]
"""A result of `state`, or the path of a file that `save` wrote."""


def write_state(path: str | os.PathLike[str], state: bytes | memoryview) -> None:
    """Write a state atomically: on failure, the file stays as it is.

    Raises:
        StateError: the file cannot be written.
    """
    try:
        write_durably(Path(path), state)
    except (OSError, ValueError, TypeError) as error:
        raise StateError(f"cannot write the state to {path}: {_reason(error)}") from error


def read_state(state: State) -> bytes | memoryview:
    """The bytes of a state.

    Raises:
        StateError: the file cannot be read, or this is neither bytes nor a path.
    """
    if isinstance(state, bytes | bytearray | memoryview):
        return state
    if not isinstance(state, str | os.PathLike):
        raise StateError(f"a {type(state).__name__} is not a state; pass what state() returned, or the path of a file")
    try:
        return Path(state).read_bytes()
    except (OSError, ValueError) as error:
        raise StateError(f"cannot read the state in {state}: {_reason(error)}") from error


def _reason(error: OSError | ValueError | TypeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
