"""Weights and a count that a worker's pod keeps for the next head: the actor dies with its head's Ray cluster, the
pod does not.

    FOLDER/settled       "2 81920": the head of epoch 2 said that 81,920 frames are not collected again
    FOLDER/12.weights    8 bytes: length of the header, little-endian; the header: JSON; the file as it was published

One file a publish, the newest of each model; written beside the stepping, renamed when whole, never synced: the pod's
disk ends with the pod. What a new head asks for is these files, one after the other.
"""

import hashlib
import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from cormorant_contract.disk import write_all
from cormorant_worker.errors import MalformedWeights
from cormorant_worker.normalize import Statistics
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion

log = structlog.get_logger()

_SUFFIX, _PART, _SETTLED = ".weights", ".part", "settled"
_LENGTH = 8
_LONGEST_HEADER = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Frames that no later head collects again, as a head counted them."""

    epoch: int = -1
    """Of that head: see `FleetOptions.epoch`; -1: there was none."""
    frames: int = 0


NOTHING_SETTLED = Settled()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Fleet -> worker: use published weights, which are the payload."""

    version: PolicyVersion
    default_model: str = ""
    """Model of tensors whose names contain no model."""
    models: tuple[str, ...] = ()
    """Models to apply; other models in the payload are outdated."""
    statistics: Statistics | None = None
    """Normalization statistics of the version; None unless the manifest normalizes."""


class CachedWeights:
    """The folder of one pod. One thread at a time may use it."""

    def __init__(self, folder: Path | None) -> None:
        """Look at what an earlier actor of this pod kept. `folder` is made when it is needed; None keeps nothing."""
        self._folder = folder
        self._models: dict[int, tuple[str, ...]] = {}
        """Models of each kept publish, by version."""
        self.settled = NOTHING_SETTLED
        """The highest count that earlier actors were told."""
        if folder is not None:
            with suppress(OSError, ValueError):
                epoch, frames = map(int, (folder / _SETTLED).read_text().split())
                self.settled = Settled(epoch=epoch, frames=frames)
        self._newest_settled = self.settled.frames
        self._keeping = threading.Lock()
        for path in sorted(folder.glob(f"*{_SUFFIX}")) if folder is not None and folder.is_dir() else ():
            with suppress(OSError, ValueError, KeyError), path.open("rb") as file:
                header = _read_header(memoryview(file.read(_LONGEST_HEADER)))[0]
                self._models[header["version"]] = tuple(header["models"])

    @property
    def version(self) -> PolicyVersion:
        """The newest that is kept; 0: none."""
        return PolicyVersion(max(self._models, default=INITIAL_VERSION))

    def keep_settled(self, settled: Settled) -> None:
        """Keep the count of a head, unless a higher one is kept: a new head has not received that yet. Thread-safe."""
        if self._folder is None:
            return
        with self._keeping:
            if settled.frames <= self._newest_settled:
                return
            self._newest_settled = settled.frames
            part = self._folder / f"{_SETTLED}{_PART}"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                part.write_text(f"{settled.epoch} {settled.frames}")
                part.replace(self._folder / _SETTLED)
            except OSError as error:
                log.warning("count_not_kept", reason=f"{error}; a new head may collect acknowledged frames again")

    def keep(self, taken: Offer, data: memoryview) -> None:
        """Keep a publish that was taken, and drop those that have no newest model. A full disk costs a log line."""
        version, models = taken.version, taken.models
        if self._folder is None or version in self._models:
            return
        header = {
            "version": version, "default_model": taken.default_model, "models": list(models), "size": len(data),
            "digest": _digest(data),
        }  # fmt: skip
        if taken.statistics is not None:
            header["statistics"] = taken.statistics.document()
        encoded = json.dumps(header).encode()
        part = self._folder / f"{version}{_PART}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb", buffering=0) as file:
                write_all(file.fileno(), memoryview(len(encoded).to_bytes(_LENGTH, "little") + encoded))
                write_all(file.fileno(), data)
            part.replace(self._folder / f"{version}{_SUFFIX}")
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            log.warning(
                "weights_not_kept",
                policy_version=int(version),
                reason=f"{error}; a new head may not find these weights",
            )
            return
        self._models[version] = models
        newer: set[str] = set()
        for kept in sorted(self._models, reverse=True):
            if newer.issuperset(self._models[kept]):
                with suppress(OSError):  # the new one is kept: what is left of older ones comes before it
                    (self._folder / f"{kept}{_SUFFIX}").unlink()
                del self._models[kept]
            else:
                newer.update(self._models[kept])

    def read(self) -> bytes:
        """Everything that is kept, oldest first, for `read_cached`. Raises OSError where the disk failed."""
        if self._folder is None:
            return b""
        return b"".join((self._folder / f"{version}{_SUFFIX}").read_bytes() for version in sorted(self._models))


def read_cached(data: bytes) -> list[tuple[Offer, memoryview]]:
    """Parse the bytes of `CachedWeights.read`, oldest first: offers, and the safetensors files that they were of."""
    cached, rest = list[tuple[Offer, memoryview]](), memoryview(data)
    try:
        while len(rest):
            header, begin = _read_header(rest)
            file, rest = rest[begin : begin + header["size"]], rest[begin + header["size"] :]
            if len(file) != header["size"] or _digest(file) != header["digest"]:
                raise ValueError(f"version {header['version']} differs from its digest")  # noqa: TRY301  # as below
            offer = Offer(
                version=PolicyVersion(header["version"]),
                default_model=header["default_model"],
                models=tuple(header["models"]),
                statistics=Statistics.of_document(header["statistics"]) if "statistics" in header else None,
            )
            cached.append((offer, file))
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedWeights(f"cannot read the weights cached from an earlier head: {error}") from error
    return cached


def _read_header(data: memoryview) -> tuple[dict[str, Any], int]:
    """The header, and where the file begins."""
    begin = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    header = json.loads(bytes(data[_LENGTH:begin]))
    if not isinstance(header, dict):
        raise ValueError("there is no header")  # noqa: TRY004  # as for other bytes that are none
    return header, begin


def _digest(data: memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
