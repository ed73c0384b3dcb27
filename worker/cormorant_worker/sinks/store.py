"""Where a dataset's files lie: a protocol, chosen by the URI. Folders are in `local_store.py`, what
fsspec opens in `object_store.py`.
"""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    lines: tuple[str, ...]
    is_torn: bool = False
    """True when a last line was cut off by a crash; it is not among `lines`."""


class ShardFile(Protocol):
    """A shard that is being written: open() -> write()* -> publish() or discard()."""

    size_bytes: int
    """Bytes written so far."""
    closed: bool

    def write(self, data: Any) -> int:
        """Append bytes, or any buffer. Returns how many."""

    def flush(self) -> None:
        """For writers that ask for it; does nothing."""

    def publish(self) -> str:
        """Make the shard durable under its name. Returns its SHA-256, 64 hex digits."""

    def discard(self) -> None:
        """Throw the shard away and free its space. May be called twice, and after `publish` does nothing."""


class DatasetStore(Protocol):
    """The files of one dataset. Raises OSError, which the caller explains."""

    uri: str

    def read_root(self, name: str) -> bytes | None:
        """A file at the root, or None when there is none."""

    def write_root_once(self, name: str, data: bytes) -> None:
        """Write a file at the root, durably and atomically; the first writer wins."""

    def root_files(self) -> list[str]: ...

    def parts(self) -> list[str]:
        """Names of the folders at the root, sorted."""

    def create_part(self, part: str) -> None:
        """Make a part's folder.

        Raises:
            FileExistsError: another process made it.
        """

    def create_shard(self, part: str, name: str) -> ShardFile: ...

    def note(self, part: str, number: int, line: str) -> None:
        """Add the `number`-th line to a part's manifest, durably."""

    def notes(self, part: str) -> Notes: ...

    def end_part(self, part: str) -> Notes:
        """The lines of a part whose writer has ended. Lines that arrive later do not count: a request that the writer
        sent before it died may still be on its way to an object store.
        """

    def files(self, part: str) -> dict[str, int]:
        """Names and sizes in bytes of a part's shards, published or not; the manifest is not among them."""

    def open(self, part: str, name: str) -> Any:
        """A published shard as a pyarrow.NativeFile. Raises FileNotFoundError."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be written, where that is known."""
