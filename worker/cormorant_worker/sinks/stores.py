"""Where the files of a dataset lie: in a folder, or behind fsspec (`memory://`, `s3://`, `gs://`, ...).

In a folder:

    frames-000000.arrow.open -> fsync -> rename to frames-000000.arrow -> fsync of the folder -> line of manifest.jsonl

A shard belongs to the dataset once its line is on disk. What a crash leaves behind before that (an `.open` file, a
shard without a line, a line without its newline) is never read and never repaired: no process continues another's part.

Behind fsspec there are whole objects, without append, rename and locks, as durable as their service makes them. An
open shard lies in memory; each line is an object, `<part>/manifest/000000.json`, with up to 63 lines before it.

A request may arrive after its sender has died, and a worker that its fleet has lost may still write from a node that is
cut off. The fleet therefore ends the part of a worker that has not finished before it counts its frames:
`<part>/ended.json` has the number of lines that count. The first writer of such a file wins, which requires conditional
writes of an object store (S3 and MinIO support them).
"""

import ctypes
import hashlib
import io
import json
import mmap
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog

from cormorant_contract.disk import local_path, sync_path, write_all, write_durably
from cormorant_worker.errors import DatasetError

log = structlog.get_logger()
T = TypeVar("T")

_MANIFEST = "manifest.jsonl"
_GATHER = 64 << 10
_LINES_FOLDER = "manifest"
_OWNER = "owner"
_ENDED = "ended.json"
_LINES = 64
"""Manifest lines an object: a part of 6,400 shards is read with 100 requests."""
_PAUSE_S = 1.0
_BUCKET_SCHEMES = frozenset({"s3", "gs", "az"})
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _EndedParts(ABC):
    """Manifest lines, of which those do not count that come after the fleet has ended their part."""

    @abstractmethod
    def read_root(self, name: str) -> bytes | None: ...

    @abstractmethod
    def write_root(self, name: str, data: bytes, *, is_first: bool = False) -> None: ...

    @abstractmethod
    def _all_lines(self, part: str) -> list[str]:
        """All lines, whether they count or not."""

    def lines(self, part: str) -> list[str]:
        """The lines of a part's manifest that end with a newline, and count."""
        return self._all_lines(part)[: self._read_end(part)]

    def end_part(self, part: str) -> list[str]:
        """The lines of a part whose writer has ended or is lost; what it writes later does not count."""
        if self._read_end(part) is None:
            count = len(self._all_lines(part))
            self.write_root(f"{part}/{_ENDED}", json.dumps({"lines": count}).encode(), is_first=True)
        # Another head may have ended it a moment later.
        return self.lines(part)

    def _refuse_late(self, part: str, number: int) -> None:
        """Raise OSError where the part was ended before its `number`-th line was written."""
        if (counted := self._read_end(part)) is not None and counted <= number:
            raise OSError(f"a head of this job ended the part after {counted} shards")

    def _read_end(self, part: str) -> int | None:
        data = self.read_root(f"{part}/{_ENDED}")
        return None if data is None else int(json.loads(data)["lines"])


class LocalStore(_EndedParts):
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

    def write_root(self, name: str, data: bytes, *, is_first: bool = False) -> None:
        """Write a file below the root, durably and atomically. `is_first`: one that exists stays as it is."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data, is_first=is_first)

    def files(self, folder: str = "") -> list[str]:
        """Names of the files in the root, or in a folder below it, sorted."""
        path = self.root / folder
        return sorted(entry.name for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []

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
        descriptor = os.open(self.root / part / _MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
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
        self._refuse_late(part, number)

    def end_part(self, part: str) -> list[str]:
        try:
            return super().end_part(part)  # makes its folder: a writer that has not begun it cannot begin it then
        except OSError as error:
            late = "if its worker still runs and writes when there is room, the dataset has frames that are not counted"
            log.warning("part_not_ended", folder=f"{self.root / part}", reason=f"{error.strerror}; {late}")
        return self.lines(part)

    def _all_lines(self, part: str) -> list[str]:
        try:
            text = (self.root / part / _MANIFEST).read_bytes()
        except FileNotFoundError:
            return []
        return [line.decode("utf-8", "replace") for line in text.split(b"\n")[:-1]]

    def open(self, part: str, name: str) -> Any:
        """A published shard as a pyarrow.NativeFile, mapped into memory, where writes stay in this process."""
        import pyarrow as pa  # evaluations do not wait for it

        # Not mmap.mmap, which holds a descriptor for each mapping: a dataset has thousands of shards.
        file = pa.memory_map(str(self.root / part / name))
        buffer = file.read_buffer()
        file.seek(0)
        if buffer.size and _libc.mprotect(buffer.address, buffer.size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(number := ctypes.get_errno(), os.strerror(number))
        return file


class LocalShardFile(io.BufferedRandom):
    """A shard that is being written, an `.open` file: open() -> write()* -> publish() or discard()."""

    def __init__(self, path: Path) -> None:
        self._path, self._draft = path, path.with_name(path.name + ".open")
        # Gathers small buffers, of which a batch has dozens; big ones are written through.
        super().__init__(io.FileIO(self._draft, "x+"), _GATHER)

    @property
    def size_bytes(self) -> int:
        return self.tell()

    def publish(self) -> str:
        """Make the shard durable under its name: fsync, rename, fsync of the folder. Returns its SHA-256 in hex."""
        self.flush()
        os.fsync(self.fileno())
        self.seek(0)
        digest = hashlib.file_digest(self, "sha256").hexdigest()
        self._draft.rename(self._path)
        sync_path(self._path.parent)
        self.close()
        return digest

    def discard(self) -> None:
        """Close, and remove the `.open` file if it was not published. May be called twice."""
        with suppress(OSError):
            self.close()  # tries again to write what the disk did not take
        self._draft.unlink(missing_ok=True)


class ObjectStore(_EndedParts):
    """The files of a dataset as objects; `LocalStore` documents the methods."""

    def __init__(self, uri: str, *, patience_s: float = 120.0) -> None:
        """Make a client; nothing is requested. `patience_s`: how long requests are repeated once the store has
        answered.
        """
        self.uri = uri.rstrip("/")
        self._patience_s = patience_s
        self._has_answered = False
        import fsspec  # folders do not wait for it
        from fsspec.dircache import DirCache

        self._fs, root = fsspec.core.url_to_fs(self.uri)
        # A listing that was kept would not have what another process has put since.
        self._fs.dircache = DirCache(use_listings_cache=False)
        self._root = root.rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else {*self._fs.protocol}
        self._has_folders = not protocols & _BUCKET_SCHEMES
        """False: of buckets, which are never made: a name that is wrong by a letter would be one more."""
        self._lines: dict[str, list[str]] = {}
        """The last manifest lines of the parts that are written here, up to `_LINES` each."""

    def read_root(self, name: str) -> bytes | None:
        try:
            data: bytes = self._ask(lambda: self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        return data

    def write_root(self, name: str, data: bytes, *, is_first: bool = False) -> None:
        """Put an object. `is_first`: unless it exists; if several are put at the same moment, one stays."""
        with suppress(FileExistsError):  # a repeated request may find its own object
            self.put(name, data, mode="create" if is_first else "overwrite")

    def files(self, folder: str = "") -> list[str]:
        return [name for name, kind in self._list(folder) if kind == "file"]

    def parts(self) -> list[str]:
        """Names of the prefixes at the root, sorted. Objects below them are not listed."""
        return [name for name, kind in self._list("") if kind == "directory"]

    def _list(self, folder: str) -> list[tuple[str, str]]:
        """Names in a folder, and whether each is a file or a directory, sorted."""
        path = f"{self._root}/{folder}".rstrip("/")
        try:
            entries: list[dict[str, Any]] = self._ask(lambda: self._fs.ls(path, detail=True))
        except FileNotFoundError:
            return []
        return sorted((entry["name"].rstrip("/").rsplit("/", 1)[-1], entry["type"]) for entry in entries)

    def create_part(self, part: str) -> None:
        """Put an object that claims the part, since objects need no folder: other jobs at the same URI see it."""
        owner, ours = f"{part}/{_LINES_FOLDER}/{_OWNER}", uuid.uuid4().hex.encode()
        if not self._list(part):
            self.write_root(owner, ours, is_first=True)
            if self.read_root(owner) == ours:
                return
        raise FileExistsError(f"{self._root}/{part}")

    def create_shard(self, part: str, name: str) -> "ObjectShardFile":
        return ObjectShardFile(self, f"{part}/{name}")

    def note(self, part: str, number: int, line: str) -> None:
        """Put a manifest line as an object, with those before it in its group of `_LINES`."""
        lines = self._lines.setdefault(part, [])
        if number % _LINES == 0:
            lines.clear()
        text = "".join(f"{known}\n" for known in (*lines, line))
        self.put(f"{part}/{_LINES_FOLDER}/{number:06d}.json", text.encode())
        self._refuse_late(part, number)
        lines.append(line)

    def _all_lines(self, part: str) -> list[str]:
        """Of each `_LINES` objects the last one has all their lines."""
        lines: list[str] = []
        manifest = f"{part}/{_LINES_FOLDER}"
        names = [name for name in self.files(manifest) if name != _OWNER]
        for first in range(0, len(names), _LINES):
            data = self.read_root(f"{manifest}/{names[first : first + _LINES][-1]}")
            lines += [] if data is None else data.decode("utf-8", "replace").splitlines()
        return lines

    def open(self, part: str, name: str) -> Any:
        import pyarrow as pa

        data = self.read_root(f"{part}/{name}")
        if data is None:
            raise FileNotFoundError(f"{self.uri}/{part}/{name}")
        return pa.BufferReader(data)

    def put(self, name: str, data: bytes, *, mode: str = "overwrite") -> None:
        path = f"{self._root}/{name}"

        def put() -> None:
            try:
                self._fs.pipe_file(path, data, mode=mode)
            except FileNotFoundError:
                if not self._has_folders:
                    raise
                self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
                self._fs.pipe_file(path, data, mode=mode)
            except OSError:
                # Stores differ in how they say that it exists: some answers look as if they could be repeated.
                if mode != "create" or not self._fs.exists(path):
                    raise
                raise FileExistsError(path) from None

        self._ask(put)

    def _ask(self, request: Callable[[], T]) -> T:
        """Repeat a request while the store restarts; the first one not: the URI or the credentials may be wrong."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                answer = request()
            except (FileExistsError, FileNotFoundError, PermissionError):
                self._has_answered = True
                raise
            except Exception as error:  # each client library has errors of its own
                if not self._has_answered or time.monotonic() >= deadline:
                    raise error if isinstance(error, OSError) else OSError(f"{error}") from error
                time.sleep(_PAUSE_S)
            else:
                self._has_answered = True
                return answer


class ObjectShardFile(io.BytesIO):
    """A shard in memory, put as one object when it is published."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        super().__init__()
        self._store, self._name = store, name

    @property
    def size_bytes(self) -> int:
        return self.tell()

    def publish(self) -> str:
        data = self.getvalue()
        self._store.put(self._name, data)
        self.close()
        return hashlib.sha256(data).hexdigest()

    def discard(self) -> None:
        self.close()


DatasetStore = LocalStore | ObjectStore
ShardFile = LocalShardFile | ObjectShardFile


def open_store(uri: str) -> DatasetStore:
    """The store of a URI: a path, `file://`, or any scheme that fsspec knows."""
    path = local_path(uri)
    if path is not None:
        return LocalStore(path)
    if uri.endswith("://"):
        raise DatasetError(f"the dataset URI {uri} names no bucket or folder; add it, for example {uri}bucket/dataset")
    try:
        return ObjectStore(uri)
    except (ImportError, ValueError) as error:
        raise DatasetError(f"the dataset URI {uri} cannot be opened: {error}") from error
