"""The state of a whole fleet as bytes: returned by `fleet.state()`, used by `fleet.restore()`."""

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np
import safetensors.numpy
from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass

from cormorant_contract.rest.base import Count, Version
from cormorant_contract.tensor_file import parse_header
from cormorant_worker.collect.state import read_metadata
from cormorant_worker.errors import StateError
from cormorant_worker.normalize import Statistics
from cormorant_worker.weights.blob import WeightsBlob

FORMAT = 2
_PLAIN = ("frames", "version", "attempts", "seed", "run", "epoch", "dataset", "written")
"""Fields of a state that are JSON as they are, in the order of the file."""
_PAST, _WORKER = "past/", "worker/"
CURRENT = -1
"""Key, beside versions, of the statistics that the next version will be published with."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
class FleetState:
    """Every collector's state, the published weights, the count of frames."""

    frames: Count
    version: Version
    weights: bytes | memoryview
    """Safetensors of every model's newest weights; empty when nothing was published."""
    attempts: Mapping[str, Count]
    """The last random stream of each slot, by worker name: their seeds must not be used again."""
    seed: NonNegativeInt
    """Seed from which replacement workers derive their random streams: torch's have 64 bits."""
    workers: Mapping[str, bytes | memoryview]
    """`state.py`'s bytes by worker name."""
    past: Mapping[int, bytes | memoryview] = field(default_factory=dict)
    """Earlier publishes that groups of agents may play, oldest first; `weights` is then the last publish alone."""
    run: str = ""
    epoch: Count = 0
    dataset: str = ""
    """URI; empty: none."""
    written: Mapping[str, Count] = field(default_factory=dict)
    """Frames received from each slot, by worker name, including those that earlier fleets left in the dataset."""
    statistics: Mapping[int, Statistics] = field(default_factory=dict)
    """Statistics of each published version, and as CURRENT those of all acknowledged frames; empty without
    `normalize`."""

    def publishes(self, *, after: int) -> dict[int, WeightsBlob]:
        """Publishes after which a fleet whose last version is `after` acts as this one did, oldest first; empty: it has
        newer weights. A model whose newest weights are older gets them with the first. Raises WeightsError.
        """
        if not self.weights or self.version <= after:
            return {}
        files = {**self.past, self.version: self.weights}
        blobs = {version: WeightsBlob.from_bytes(data) for version, data in files.items()}
        older: dict[str, Mapping[str, Any]] = {}
        for version in [version for version in blobs if version <= after]:
            older |= blobs.pop(version).weights()
        first = next(iter(blobs))
        published = {model for blob in blobs.values() for model in blob.tensors}
        if late := {model: tensors for model, tensors in older.items() if model not in published}:
            blobs[first] = WeightsBlob.of({**blobs[first].weights(), **late})
        for version, blob in blobs.items():
            blob.statistics = self.statistics.get(version)
        return blobs

    @property
    def not_saved(self) -> dict[str, list[str]]:
        """Workers, by reason, whose environments begin new episodes when this is restored."""
        differing: dict[str, list[str]] = {}
        for name, data in sorted((name, data) for name, data in self.workers.items() if data):
            told = read_metadata(data)
            if not told["envs_saved"]:
                differing.setdefault(told.get("why_not") or "they cannot be saved", []).append(name)
        return differing

    def to_bytes(self) -> bytes:
        """Encode as safetensors: one uint8 array per part, JSON in the metadata."""
        parts = {"weights": self.weights, **{_WORKER + name: data for name, data in self.workers.items()}}
        parts |= {f"{_PAST}{version}": data for version, data in self.past.items()}
        arrays = {name: np.frombuffer(data, dtype=np.uint8) for name, data in parts.items() if data}
        metadata: dict[str, Any] = {"format": FORMAT} | {name: getattr(self, name) for name in _PLAIN}
        if self.statistics:
            metadata["statistics"] = {str(version): found.document() for version, found in self.statistics.items()}
        data: bytes = safetensors.numpy.save(arrays, metadata={"cormorant_fleet": json.dumps(metadata)})
        return data

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "FleetState":
        """Decode the result of `to_bytes`, whatever the bytes are. Weights and workers are views of `data`: a state may
        be gigabytes.
        """
        try:
            parsed = parse_header(data)
            metadata = json.loads(parsed.metadata["cormorant_fleet"])
            if metadata["format"] != FORMAT:
                raise StateError(f"the state has format {metadata['format']}, this version reads {FORMAT}")
            body, parts = memoryview(data)[parsed.data_start :], dict[str, memoryview]()
            for name, entry in parsed.tensors.items():
                if entry.dtype != "U8" or len(entry.shape) != 1:
                    raise ValueError(f"{name[:80]} is not a byte array")  # noqa: TRY301  # as for other bytes
                parts[name] = body[entry.begin : entry.end]
            workers = {name.removeprefix(_WORKER): part for name, part in parts.items() if name.startswith(_WORKER)}
            older = sorted(int(name.removeprefix(_PAST)) for name in parts if name.startswith(_PAST))
            state = cls(
                **{name: metadata[name] for name in _PLAIN if name in metadata},
                weights=parts.get("weights", b""),
                past={version: parts[f"{_PAST}{version}"] for version in older},
                statistics={
                    int(version): Statistics.of_document(found)
                    for version, found in dict(metadata.get("statistics", {})).items()
                },
                workers=workers,
            )
            if workers.keys() != state.attempts.keys():
                raise ValueError(f"it holds workers {sorted(workers)} but attempts of {sorted(state.attempts)}")  # noqa: TRY301  # as above
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(
                f"these {len(data)} bytes are not a fleet's state: {str(error)[:300]}; give what state() returned"
            ) from error
        return state
