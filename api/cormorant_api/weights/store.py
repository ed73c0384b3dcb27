"""The last K published versions, in a directory or in memory; their files are cut from uploads, and joined.

    DIR/weights/
      12.part/           not accepted yet; removed at start
      12/meta.json       version, author, time; of each model: name, file, digest, size
      12/0.safetensors   one model's tensors, under their plain names

A version is accepted in memory first: only then the rename makes it visible to the next head. File names are numbers:
nothing that a client sends becomes a path. A version whose bytes do not match their digest (after a power failure) is
skipped at start.
"""

import json
import mmap
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
import xxhash

from cormorant_api.errors import StoreError
from cormorant_contract.disk import sync_path, write_all
from cormorant_contract.policy import Policy
from cormorant_contract.rest.base import DIGEST_PREFIX, make_etag
from cormorant_contract.tensor_file import TensorEntry, make_header, parse_header
from cormorant_worker.errors import StateError
from cormorant_worker.normalize import Statistics
from cormorant_worker.weights.blob import WeightsBlob

log = structlog.get_logger()

Tensors = dict[str, tuple[TensorEntry, memoryview]]
"""Entries and bytes by name, in the order of a file."""
_META = "meta.json"
_PART = ".part"
_OF_A_MODEL = ("name", "digest", "size_bytes", "num_tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """One model's bytes in one version."""

    version: int
    name: str
    digest: str
    buffers: tuple[memoryview, ...]
    """Pieces of a safetensors file."""
    num_tensors: int

    @property
    def size_bytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)

    @property
    def file(self) -> memoryview:
        """The pieces as one buffer; copies if there are several."""
        return self.buffers[0] if len(self.buffers) == 1 else memoryview(b"".join(self.buffers))

    @property
    def etag(self) -> str:
        """The strong ETag, with quotes."""
        return make_etag(self.version, self.digest)

    def describe(self) -> dict[str, Any]:
        """The fields that `ModelSummary` and `VersionEntry` have in common."""
        return {"version": self.version, "digest": self.digest, "etag": self.etag, "bytes": self.size_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    version: int
    digest: str
    """Digest of the request body."""
    published_at: datetime
    author: str
    models: Mapping[str, StoredModel]
    statistics: Statistics | None = None
    """Normalization statistics; None unless the manifest normalizes."""

    @property
    def size_bytes(self) -> int:
        return sum(model.size_bytes for model in self.models.values())


class WeightStore:
    """The last K versions of every model, and those that groups of agents may play. Thread-safe; one thread at a time
    may write.
    """

    def __init__(self, folder: Path | None, *, keeps: int, policy: Policy | None = None) -> None:
        """Open the store, reading what an earlier head left; StoreError if the folder cannot be used. `folder`: parent
        of `weights/`; None: memory only. `keeps`: versions to retain per model. `policy`: says which older versions are
        still played.
        """
        self.keeps, self._policy = max(1, keeps), policy
        self._folder = folder / "weights" if folder is not None else None
        self._lock = threading.Lock()
        """Guards `_versions`, which is replaced as a whole, and `_durable`."""
        self._versions: dict[int, StoredVersion] = {}
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                for path in self._folder.iterdir():
                    if path.name.endswith(_PART):
                        shutil.rmtree(path, ignore_errors=True)
                    elif path.name.isdigit() and (stored := _read(path)) is not None:
                        self._versions[stored.version] = stored
            except OSError as error:
                raise StoreError(f"cannot use {self._folder} to store weights: {error}") from error
        self._durable = self.newest
        """The newest version that the next head finds."""

    @property
    def newest(self) -> int:
        """The newest version; 0 when there is none."""
        return max(self._versions, default=0)

    @property
    def versions(self) -> list[int]:
        """Retained versions, oldest first."""
        return sorted(self._versions)

    def version(self, number: int) -> StoredVersion | None:
        return self._versions.get(number)

    def model(self, name: str, version: int | None = None) -> StoredModel | None:
        """A model at that version (default: the newest)."""
        return next((v.models[name] for v in self.history(name) if version in (None, v.version)), None)

    def history(self, name: str) -> list[StoredVersion]:
        """Retained versions with a model, newest first."""
        return [stored for _, stored in sorted(self._versions.items(), reverse=True) if name in stored.models]

    def current(self) -> dict[str, StoredModel]:
        """The newest version of every published model."""
        models: dict[str, StoredModel] = {}
        for _, stored in sorted(self._versions.items()):
            models.update(stored.models)
        return models

    def write(self, stored: StoredVersion) -> StoredVersion:
        """Write a version to the disk, invisible before `accept`. Returns it backed by the stored bytes; after a
        StoreError nothing is left of it.
        """
        if self._folder is None:
            return stored
        part = self._folder / f"{stored.version}{_PART}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            models = list(stored.models.values())
            for number, model in enumerate(models):
                with (part / f"{number}.safetensors").open("wb", buffering=0) as file:
                    for buffer in model.buffers:
                        write_all(file.fileno(), buffer)
            document = {
                "format": 1,
                "version": stored.version,
                "digest": stored.digest,
                "published_at": stored.published_at.isoformat(),
                "author": stored.author,
                "models": [{name: getattr(model, name) for name in _OF_A_MODEL} for model in models],
            }
            if stored.statistics is not None:
                document["statistics"] = stored.statistics.document()
            (part / _META).write_text(json.dumps(document, indent=1), "utf-8")
            return _map(part, document)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise StoreError(f"cannot store weights version {stored.version}: {error}") from error

    def accept(self, stored: StoredVersion) -> None:
        """Make a written version visible in this process. `keep` makes it visible to the next head, once the fleet has
        accepted it.
        """
        with self._lock:
            self._versions = {**self._versions, stored.version: stored}

    def prune(self, number: int) -> list[int]:
        """Hide versions that this one replaces; newer ones may still be refused. As many of those that the next head
        finds stay as of all. Returns the hidden ones; `remove` deletes their files.
        """
        older = {n: publish for n, publish in self._versions.items() if n <= number}
        wanted: set[int] = set()
        for model in {name for publish in older.values() for name in publish.models}:
            holding = sorted(n for n, publish in older.items() if model in publish.models)
            for several in (holding, [n for n in holding if n <= self._durable]):
                wanted.update(several[-self.keeps :])
                wanted.update(() if self._policy is None else self._policy.versions_kept(model, several))
        hidden = [n for n in older if n not in wanted]
        self.forget(*hidden)
        return hidden

    def forget(self, *numbers: int) -> None:
        """Hide versions, such as one that the fleet refused. `remove` deletes their files."""
        with self._lock:
            self._versions = {n: publish for n, publish in self._versions.items() if n not in numbers}

    def remove(self, numbers: Sequence[int]) -> None:
        """Delete the files of hidden versions."""
        for number in numbers:
            if self._folder is not None:
                # Open readers keep their mapping.
                shutil.rmtree(self._folder / f"{number}{_PART}", ignore_errors=True)
                shutil.rmtree(self._folder / str(number), ignore_errors=True)

    def keep(self, number: int) -> None:
        """Make a version outlive this process, and flush it to the disk; StoreError if that failed. Repeating it is
        safe.
        """
        if self._folder is None or number not in self._versions:
            return
        part, folder = self._folder / f"{number}{_PART}", self._folder / str(number)
        try:
            if part.exists():
                # A broken version that the start skipped.
                shutil.rmtree(folder, ignore_errors=True)
                part.rename(folder)
            for path in (*folder.iterdir(), folder, self._folder):
                sync_path(path)
        except FileNotFoundError:
            return  # a newer version replaced it
        except OSError as error:
            raise StoreError(f"could not keep weights version {number}: {error}") from error
        with self._lock:
            self._durable = max(self._durable, number)


def digest_of(buffers: Sequence[memoryview]) -> str:
    """`xxh3:` and 32 hex digits."""
    hasher = xxhash.xxh3_128()
    for buffer in buffers:
        hasher.update(buffer)
    return DIGEST_PREFIX + hasher.hexdigest()


def _read(folder: Path) -> StoredVersion | None:
    try:
        stored = _map(folder, json.loads((folder / _META).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StateError) as error:
        log.warning("weights_left_out", folder=str(folder), reason=str(error))
        return None
    for model in stored.models.values():
        if digest_of(model.buffers) != model.digest:
            log.warning("weights_left_out", folder=str(folder), reason=f"{model.name} does not match its digest")
            return None
    return stored


def _map(folder: Path, document: Mapping[str, Any]) -> StoredVersion:
    version, models = int(document["version"]), {}
    for number, model in enumerate(document["models"]):
        with (folder / f"{number}.safetensors").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(mapped) != model["size_bytes"]:
            raise ValueError(f"{model['name']} has {len(mapped)} bytes, not {model['size_bytes']}")
        models[model["name"]] = StoredModel(
            version=version,
            name=model["name"],
            digest=model["digest"],
            buffers=(memoryview(mapped),),
            num_tensors=int(model["num_tensors"]),
        )
    statistics = document.get("statistics")
    return StoredVersion(
        version=version,
        digest=document["digest"],
        published_at=datetime.fromisoformat(document["published_at"]).astimezone(UTC),
        author=str(document["author"]),
        models=models,
        statistics=None if statistics is None else Statistics.of_document(statistics),
    )


def cut(blob: WeightsBlob, entries: Mapping[str, TensorEntry]) -> tuple[memoryview, ...]:
    """Pieces of a file of one model's tensors, with unprefixed names and the metadata of the whole."""
    parsed = parse_header(blob.buffer)
    return _laid_out(_located(blob.buffer[parsed.data_start :], entries), parsed.metadata)


def joined(models: Mapping[str, StoredModel]) -> WeightsBlob:
    """Several models in one file, with the model as name prefix and the metadata of the newest."""
    newest = max(stored.version for stored in models.values())
    tensors: Tensors = {}
    metadata: Mapping[str, str] = {}
    for model, stored in sorted(models.items()):
        parsed = parse_header(stored.file)
        metadata = parsed.metadata if stored.version == newest else metadata
        for name, found in _located(stored.file[parsed.data_start :], parsed.tensors).items():
            tensors[f"{model}/{name.removeprefix(model + '/')}"] = found
    return WeightsBlob.joined(_laid_out(tensors, metadata))


def _located(data: memoryview, entries: Mapping[str, TensorEntry]) -> Tensors:
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    return {name: (entry, data[entry.begin : entry.end]) for name, entry in ordered}


def _laid_out(tensors: Tensors, metadata: Mapping[str, str]) -> tuple[memoryview, ...]:
    header, _ = make_header([(name, entry.dtype, entry.shape) for name, (entry, _) in tensors.items()], metadata)
    return (memoryview(header), *(data for _, data in tensors.values()))
