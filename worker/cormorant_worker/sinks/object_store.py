"""A dataset behind fsspec (`memory://`, `s3://`, `gs://`, ...): whole objects, since there is no append and no rename.

Weaker than a folder: there is no lock; an open shard lives in this process's memory; each manifest line is an object of
its own, `<part>/manifest/000000.json`, which repeats the lines before it, up to 64 in all; and an object is as durable
as its service guarantees.

A request may arrive after its sender has died. The fleet therefore ends a part before it counts its frames:
`<part>/ended.json` has the number of lines that count. The first writer of such an object wins, which requires
conditional writes (S3 and MinIO support them).
"""

import hashlib
import io
import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
from fsspec.dircache import DirCache

from cormorant_worker.sinks.local_store import LocalShardFile, LocalStore, Notes

T = TypeVar("T")

_MANIFEST = "manifest"
_OWNER = "owner"
_ENDED = "ended.json"
_LINES = 64
"""Manifest lines an object: a part of 6,400 shards is read with 100 requests."""
_PAUSE_S = 1.0
_BUCKET_SCHEMES = frozenset({"s3", "gs", "az"})


class ObjectStore:
    """The files of a dataset as objects; `LocalStore` documents the methods."""

    def __init__(self, uri: str, *, patience_s: float = 120.0) -> None:
        """Make a client; nothing is requested. `patience_s`: how long requests are repeated once the store has
        answered.
        """
        self.uri = uri.rstrip("/")
        self._patience_s = patience_s
        self._has_answered = False
        self._fs, root = fsspec.core.url_to_fs(self.uri)
        # A listing that was kept would not have what another process has put since.
        self._fs.dircache = DirCache(use_listings_cache=False)
        self._root = root.rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else {*self._fs.protocol}
        self._bucket = self._root.partition("/")[0] if protocols & _BUCKET_SCHEMES else None
        """None: a store of folders. A bucket is never made: a name that is wrong by a letter would be one more."""
        self._lines: dict[str, list[str]] = {}
        """The last manifest lines of the parts that are written here, up to `_LINES` each."""

    def read_root(self, name: str) -> bytes | None:
        try:
            data: bytes = self._ask(lambda: self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError as error:
            if "NoSuchBucket" in repr(error.__cause__):
                raise FileNotFoundError(f"bucket {self._bucket} does not exist; check the URI") from error
            return None
        return data

    def write_root_once(self, name: str, data: bytes) -> None:
        """Put an object unless it exists. If several are put at the same moment, one stays."""
        with suppress(FileExistsError):  # a repeated request may find its own object
            self.put(name, data, mode="create")

    def root_files(self) -> list[str]:
        return self._list("file")

    def parts(self) -> list[str]:
        """Names of the prefixes at the root, sorted. Objects below them are not listed."""
        return self._list("directory")

    def _list(self, kind: str) -> list[str]:
        try:
            found: list[dict[str, Any]] = self._ask(lambda: self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in found if entry["type"] == kind)

    def create_part(self, part: str) -> None:
        """Put an object that claims the part, since objects need no folder: other jobs at the same URI see it."""
        owner, ours = f"{part}/{_MANIFEST}/{_OWNER}", uuid.uuid4().hex.encode()
        if not self._find(part):
            self.write_root_once(owner, ours)
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
        self.put(f"{part}/{_MANIFEST}/{number:06d}.json", text.encode())
        if (counted := self._read_end(part)) is not None and counted <= number:
            raise OSError(f"another head of this job ended the part after {counted} shards")
        lines.append(line)

    def notes(self, part: str) -> Notes:
        return Notes(lines=self._lines_of(part)[: self._read_end(part)])

    def end_part(self, part: str) -> Notes:
        """The lines of a part whose writer has ended; those of requests that it sent before and arrive later do not
        count.
        """
        counted, lines = self._read_end(part), self._lines_of(part)
        if counted is None:
            self.write_root_once(f"{part}/{_ENDED}", json.dumps({"lines": len(lines)}).encode())
            counted = self._read_end(part)
        # Another head may have ended it a moment later.
        return Notes(lines=lines[:counted]) if counted is not None and counted <= len(lines) else self.notes(part)

    def _read_end(self, part: str) -> int | None:
        data = self.read_root(f"{part}/{_ENDED}")
        return None if data is None else int(json.loads(data)["lines"])

    def _lines_of(self, part: str) -> tuple[str, ...]:
        """Of each `_LINES` objects the last one has all their lines."""
        found: list[str] = []
        manifest = f"{part}/{_MANIFEST}"
        names = sorted(name for name in self._find(manifest) if name != _OWNER)
        for first in range(0, len(names), _LINES):
            data = self.read_root(f"{manifest}/{names[first : first + _LINES][-1]}")
            found += [] if data is None else data.decode("utf-8", "replace").splitlines()
        return tuple(found)

    def files(self, part: str) -> dict[str, int]:
        ours = (f"{_MANIFEST}/", _ENDED)
        return {name: size for name, size in sorted(self._find(part).items()) if not name.startswith(ours)}

    def open(self, part: str, name: str) -> Any:
        data = self.read_root(f"{part}/{name}")
        if data is None:
            raise FileNotFoundError(f"{self.uri}/{part}/{name}")
        return pa.BufferReader(data)

    def free_bytes(self) -> int | None:
        return None

    def put(self, name: str, data: bytes, *, mode: str = "overwrite") -> None:
        path = f"{self._root}/{name}"

        def put() -> None:
            try:
                self._fs.pipe_file(path, data, mode=mode)
            except FileNotFoundError:  # some stores do have folders
                if self._bucket is not None:
                    raise FileNotFoundError(f"bucket {self._bucket} does not exist") from None
                self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
                self._fs.pipe_file(path, data, mode=mode)
            except OSError:
                # Stores differ in how they say that it exists: some answers look as if they could be repeated.
                if mode != "create" or not self._fs.exists(path):
                    raise
                raise FileExistsError(path) from None

        self._ask(put)

    def _find(self, folder: str) -> dict[str, int]:
        """Names below a folder, and sizes."""
        prefix = f"{self._root}/{folder}"
        found: dict[str, Any] = self._ask(lambda: self._fs.find(prefix, detail=True))
        # Paths begin with a slash or not, whatever the root does: `s3:///bucket/a` has one, and s3fs finds `bucket/a`.
        above = f"{prefix}/".lstrip("/")
        return {path.lstrip("/").removeprefix(above): int(entry["size"]) for path, entry in found.items()}

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
