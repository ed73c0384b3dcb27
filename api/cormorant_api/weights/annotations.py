"""Small values that a learner keeps beside the weights: its step counters, the location of its optimizer's state.

Each value belongs to one policy version. A learner that stores the value of version N before it publishes version N
finds a consistent pair after any crash: the newest published weights, and the value of their version or an older one.

    DIR/annotations/
      .12.*.part     being written; removed at start
      12             one line of JSON (key, version, digest ...), then the value

File names are numbers: nothing that a client sends becomes a path. The higher number holds the newer write. A file
whose bytes do not match their digest (after a power failure) is skipped at start.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
from pydantic import ValidationError

from cormorant_api.errors import ApiError, StoreError
from cormorant_api.weights.store import digest_of
from cormorant_contract.rest.annotations import (
    MAX_ANNOTATION_KEYS,
    MAX_ANNOTATIONS_BYTES,
    AnnotationEntry,
)
from cormorant_contract.rest.headers import make_etag
from cormorant_contract.rest.problems import ProblemType
from cormorant_worker.disk import PART, write_durably

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnnotation:
    """A value and what is known of it."""

    entry: AnnotationEntry
    value: bytes
    number: int
    """Name of its file: the n-th write of this head and its predecessors."""


class AnnotationStore:
    """The last values of every key, in memory and, with a folder, on disk. Thread-safe; methods that write block."""

    def __init__(self, folder: Path | None, *, keeps: int) -> None:
        """Open the store, reading what an earlier head left.

        Args:
            folder: parent of `annotations/`; None: memory only.
            keeps: versions to retain per key, at least one.

        Raises:
            StoreError: the folder cannot be used.
        """
        self.keeps = max(1, keeps)
        self._folder = folder / "annotations" if folder is not None else None
        self._writing = threading.Lock()
        """Held while a value is written; readers do not take it, because the mapping is replaced as a whole."""
        self._found: dict[str, dict[int, StoredAnnotation]] = {}
        """By key, then by version."""
        self._next = 0
        if self._folder is not None:
            try:
                self._open(self._folder)
            except OSError as error:
                raise StoreError(f"cannot use {self._folder} to store annotations: {error}") from error

    def newest(self) -> list[StoredAnnotation]:
        """The value of the highest version of every key, in the order of the keys."""
        return [versions[max(versions)] for _, versions in sorted(self._found.items())]

    def find(self, key: str, version: int | None = None) -> StoredAnnotation | None:
        """A key's value of the highest version, at most `version` if that is given."""
        versions = self._found.get(key, {})
        known = [number for number in versions if version is None or number <= version]
        return versions[max(known)] if known else None

    def put(
        self, key: str, version: int, value: bytes, *, author: str, check: Callable[[str], None]
    ) -> StoredAnnotation:
        """Store the value of a key for a version, durably. The same bytes again change nothing. `check`: called with
        the ETag of the key's newest value (empty: none); raises to refuse.

        Raises:
            ApiError: 409, too many keys or bytes, or the version is older than all that are retained.
            StoreError: the disk did not take it; nothing has changed.
        """
        digest = digest_of([memoryview(value)])
        with self._writing:
            before = self._found.get(key, {})
            replaced = before.get(version)
            if replaced is not None and replaced.entry.digest == digest:
                return replaced
            check(before[max(before)].entry.etag if before else "")
            kept = sorted({*before, version}, reverse=True)[: self.keeps]
            self._refuse_excess(key, version, len(value), kept)
            entry = AnnotationEntry(
                key=key,
                version=version,
                digest=digest,
                etag=make_etag(version, digest),
                bytes=len(value),
                stored_at=datetime.now(UTC),
                author=author,
            )
            stored = StoredAnnotation(entry=entry, value=value, number=self._next)
            if self._folder is not None:
                _write(self._folder, stored)
            self._next += 1
            after = {**before, version: stored}
            self._found = {**self._found, key: {number: after[number] for number in kept}}
            try:
                self._remove([old for number, old in before.items() if number not in kept or number == version])
            except StoreError as error:  # the value is stored; files that stay are values of older versions
                log.warning("annotation_not_removed", key=key, reason=str(error))
            return stored

    def delete(self, key: str, *, check: Callable[[str], None]) -> bool:
        """Remove every value of a key. Returns whether there was one.

        Raises:
            StoreError: the disk failed; values of older versions may be gone.
        """
        with self._writing:
            before = self._found.get(key)
            if before is None:
                return False
            check(before[max(before)].entry.etag)
            self._remove([before[number] for number in sorted(before)])
            self._found = {known: versions for known, versions in self._found.items() if known != key}
            return True

    def _refuse_excess(self, key: str, version: int, size: int, kept: list[int]) -> None:
        if version not in kept:
            raise ApiError(
                ProblemType.VERSION_CONFLICT,
                f"version {version} of annotation {key} is older than the {self.keeps} versions that are retained, "
                f"{kept[-1]} to {kept[0]}; name the version of the weights that the value belongs to",
                oldest_retained=kept[-1],
            )
        if key not in self._found and len(self._found) >= MAX_ANNOTATION_KEYS:
            raise ApiError(
                ProblemType.ANNOTATIONS_FULL,
                f"{len(self._found)} annotations are stored, the limit is {MAX_ANNOTATION_KEYS}; delete one, or join "
                "several values under one key",
            )
        others = sum(
            annotation.entry.bytes
            for known, versions in self._found.items()
            for number, annotation in versions.items()
            if known != key or (number in kept and number != version)
        )
        if others + size > MAX_ANNOTATIONS_BYTES:
            raise ApiError(
                ProblemType.ANNOTATIONS_FULL,
                f"{size:,} bytes beside the {others:,} that are stored exceed the limit of {MAX_ANNOTATIONS_BYTES:,} "
                "bytes for all annotations; delete one, or store its location instead of the data",
                limit_bytes=MAX_ANNOTATIONS_BYTES,
            )

    def _remove(self, annotations: Sequence[StoredAnnotation]) -> None:
        if self._folder is None:
            return
        try:
            for annotation in annotations:
                (self._folder / str(annotation.number)).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot remove annotations from {self._folder}: {error}") from error

    def _open(self, folder: Path) -> None:
        if not folder.exists():
            return
        for path in folder.glob("*" + PART):
            path.unlink()
        numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
        self._next = max(numbers, default=-1) + 1
        for number in numbers:
            if (found := _read(folder / str(number), number)) is not None:
                # A head that died between writing a value and removing the one that it replaces left both.
                self._found.setdefault(found.entry.key, {})[found.entry.version] = found
        for key, versions in self._found.items():
            kept = sorted(versions, reverse=True)[: self.keeps]
            self._found[key] = {number: versions[number] for number in kept}


def _write(folder: Path, annotation: StoredAnnotation) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = annotation.entry.model_dump_json().encode() + b"\n" + annotation.value
        write_durably(folder / str(annotation.number), data, mode=0o600)
    except OSError as error:
        raise StoreError(
            f"cannot store annotation {annotation.entry.key} in {folder}: {error}; free space on the head's volume"
        ) from error


def _read(path: Path, number: int) -> StoredAnnotation | None:
    line, _, value = path.read_bytes().partition(b"\n")
    try:
        entry = AnnotationEntry.model_validate_json(line)
    except ValidationError as error:
        log.warning("annotation_left_out", file=str(path), reason=str(error))
        return None
    if digest_of([memoryview(value)]) != entry.digest:
        log.warning("annotation_left_out", file=str(path), key=entry.key, reason="it does not match its digest")
        return None
    return StoredAnnotation(entry=entry, value=value, number=number)
