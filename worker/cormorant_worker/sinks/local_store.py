"""A dataset in a local folder: fsync, rename, and a manifest to which lines are appended.

    frames-000000.arrow.open -> fsync -> rename to frames-000000.arrow -> fsync of the folder -> manifest line

A shard belongs to the dataset once its manifest line is on disk. Whatever a crash leaves behind before that (an `.open`
file, a renamed shard without a line, a line without its newline) is never read and never repaired: a part is written by
one attempt only, so no process continues it.
"""

import contextlib
import ctypes
import hashlib
import io
import mmap
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from cormorant_contract.disk import sync_path, write_all

MANIFEST = "manifest.jsonl"
OPEN_SUFFIX = ".open"
_GATHER = 64 << 10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def local_path(uri: str) -> Path | None:
    """The folder that a path or a `file://` URI names, or None for other schemes."""
    parts = urlsplit(uri)
    if "://" not in uri:
        return Path(uri)
    if parts.scheme in ("file", "local"):
        return Path(unquote(parts.netloc + parts.path))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    lines: tuple[str, ...]
    is_torn: bool = False
    """True if a crash cut off the last line, which is not among `lines`."""


class LocalStore:
    """The files of a dataset below one folder. Raises OSError; callers add the explanation."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def read_root(self, name: str) -> bytes | None:
        """A file at the root, or None if there is none."""
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def write_root_once(self, name: str, data: bytes) -> None:
        """Write a file at the root, durably and atomically; the first writer wins."""
        self.root.mkdir(parents=True, exist_ok=True)
        draft = self.root / f".{name}.{os.getpid()}"
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # A hard link makes it appear whole, and only if there is none.
            with contextlib.suppress(FileExistsError):
                os.link(draft, self.root / name)
            sync_path(self.root)
        finally:
            draft.unlink(missing_ok=True)

    def root_files(self) -> list[str]:
        return sorted(entry.name for entry in self.root.iterdir() if entry.is_file())

    def parts(self) -> list[str]:
        """Names of the folders at the root, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in self.root.iterdir() if entry.is_dir() and entry.name[0] != ".")

    def create_part(self, part: str) -> None:
        """Make a part's folder. Raises FileExistsError where another process made it."""
        (self.root / part).mkdir()
        sync_path(self.root)

    def create_shard(self, part: str, name: str) -> "LocalShardFile":
        return LocalShardFile(self.root / part / name)

    def note(self, part: str, number: int, line: str) -> None:
        """Append the `number`-th line to a part's manifest, durably; what does not fit on the disk is removed again."""
        descriptor = os.open(self.root / part / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, memoryview(f"{line}\n".encode()))
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        if number == 0:
            sync_path(self.root / part)

    def notes(self, part: str) -> Notes:
        """The lines of a part's manifest that end with a newline."""
        try:
            text = (self.root / part / MANIFEST).read_bytes()
        except FileNotFoundError:
            return Notes(lines=())
        *lines, rest = text.split(b"\n")
        return Notes(lines=tuple(line.decode("utf-8", "replace") for line in lines), is_torn=bool(rest))

    end_part = notes
    """Manifest lines of a part whose writer has ended. Local writes are synchronous, so none are pending."""

    def files(self, part: str) -> dict[str, int]:
        """Names and sizes in bytes of a part's shards, published or not; the manifest is not among them."""
        entries = sorted((self.root / part).iterdir())
        return {entry.name: entry.stat().st_size for entry in entries if entry.name != MANIFEST}

    def open(self, part: str, name: str) -> Any:
        """A published shard as a pyarrow.NativeFile, mapped into memory, where writes stay in this process."""
        # Not mmap.mmap, which holds a descriptor for each mapping: a dataset has thousands of shards.
        file = pa.memory_map(str(self.root / part / name))
        buffer = file.read_buffer()
        file.seek(0)
        if buffer.size and _libc.mprotect(buffer.address, buffer.size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
        return file

    def free_bytes(self) -> int | None:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self.root).free
        return None


class LocalShardFile:
    """A shard that is being written, an `.open` file: open() -> write()* -> publish() or discard()."""

    def __init__(self, path: Path) -> None:
        self.size_bytes = 0
        self._path = path
        self._draft = path.with_name(path.name + OPEN_SUFFIX)
        # Gathers small buffers, of which a batch has dozens; big ones are written through.
        self._file = io.BufferedRandom(io.FileIO(self._draft, "x+"), _GATHER)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: Any) -> int:
        """Append any contiguous buffer; returns its bytes."""
        size = self._file.write(data)
        self.size_bytes += size
        return size

    def flush(self) -> None:
        """Has no effect, as pyarrow may call it; `publish` writes the buffered bytes."""

    def publish(self) -> str:
        """Make the shard durable under its name: fsync, rename, fsync of the folder. Returns its SHA-256 in hex."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        self._draft.rename(self._path)
        sync_path(self._path.parent)
        self._file.close()
        return digest

    def discard(self) -> None:
        """Close, and remove the `.open` file if it was not published. May be called twice."""
        with contextlib.suppress(OSError):
            self._file.close()  # tries again to write what the disk did not take
        self._draft.unlink(missing_ok=True)
