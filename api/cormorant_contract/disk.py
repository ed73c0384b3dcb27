"""Local files: the folder of a URI; durable writes, with all bytes written and synced to disk."""

import contextlib
import os
import secrets
from pathlib import Path
from urllib.parse import unquote, urlsplit

PART = ".part"
"""Suffix of the drafts of `write_durably`, so that the rest of a killed process can be removed."""


def local_path(uri: str) -> Path | None:
    """The folder that a path or a `file://` URI names, or None for other schemes."""
    if "://" not in uri:
        return Path(uri)
    parts = urlsplit(uri)
    return Path(unquote(parts.netloc + parts.path)) if parts.scheme in ("file", "local") else None


def write_all(descriptor: int, buffer: memoryview) -> None:
    """Write all bytes, however many calls that takes."""
    while len(buffer):
        buffer = buffer[os.write(descriptor, buffer) :]


def sync_path(path: Path) -> None:
    """Sync a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes | memoryview, *, mode: int = 0o666, is_first: bool = False) -> None:
    """Create or replace a file. After a power failure, and after an OSError, either the old or the new file is
    complete; after this returns, the new one. Several processes may write the same file. `is_first`: a file that exists
    stays as it is.
    """
    draft = path.parent / f".{path.name}.{secrets.token_hex(6)}{PART}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_first:
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)
        else:
            draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    sync_path(path.parent)
