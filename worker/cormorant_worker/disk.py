"""Durable file writes: all bytes written, and synced to disk."""

import contextlib
import os
from pathlib import Path


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


def write_durably(path: Path, data: bytes) -> None:
    """Make a file, or replace one. After a power failure it is the old or the new one, whole; on return the new one.

    Raises:
        OSError: the disk does not take it; the old one stays.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(path)
        sync_path(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
