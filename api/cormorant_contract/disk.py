"""Durable file writes: all bytes written, and synced to disk."""

import contextlib
import os
import secrets
from pathlib import Path

PART = ".part"
"""What drafts of `write_durably` end with, for those who remove what a killed process left."""


def write_all(descriptor: int, buffer: memoryview) -> None:
    """Write all bytes, however many calls that takes.

    Raises:
        OSError: the disk does not take them.
    """
    while len(buffer):
        buffer = buffer[os.write(descriptor, buffer) :]


def sync_path(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Make a file, or replace one. After a power failure it is the old or the new one, whole; on return the new one.
    Several processes may write the same file.

    Raises:
        OSError: the disk does not take it; the old one stays.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}{PART}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    sync_path(path.parent)
