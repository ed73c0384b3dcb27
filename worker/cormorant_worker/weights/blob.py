"""Weights as safetensors bytes, the one format that crosses processes, files and the network; never pickle. Published
ones are such a file in shared memory: written once, mapped by every worker, not copied between.

    make   -> fill `buffer` -> check -> publish          bytes that come from outside (the head)
    of                              -> publish          tensors of this process

Tensors are named `model/name`; plain names belong to a default model. The file's header alone says whether it fits.
"""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeVar

import fsspec
import numpy as np
import torch

from cormorant_contract.tensor_file import TORCH_NAMES, TensorEntry, TensorFile, make_header
from cormorant_contract.weights import Publishable, read_header, tensors_by_name
from cormorant_worker.errors import MalformedWeights, StateError, WeightsError
from cormorant_worker.normalize import Statistics
from cormorant_worker.policy.actor import MAIN_MODEL
from cormorant_worker.weights.staged import TensorSpec, Weights, check_finite
from cormorant_worker.wire import SharedMemory

_TORCH: dict[str, torch.dtype] = {name: getattr(torch, attribute) for name, attribute in TORCH_NAMES.items()}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}

STATISTICS = "cormorant_statistics"
"""Key of a file's metadata: the statistics that its weights act with, as JSON."""

T = TypeVar("T")

Tensors = Mapping[str, Mapping[str, TensorEntry]]
"""Offsets of tensors, by model, then by name."""


class WeightsBlob:
    """One safetensors file in shared memory. The memory is freed with the last reference."""

    def __init__(self, size_bytes: int) -> None:
        """Make an empty one; fill `buffer`, then call `check`. Raises FleetError without enough memory."""
        self.memory = SharedMemory.create(max(1, size_bytes))
        self.size_bytes = size_bytes
        self.default_model = MAIN_MODEL
        self.tensors: Tensors = {}
        """Empty until `check`."""
        self.statistics: Statistics | None = None
        """Statistics that these weights acted with before; None: they are new, and get those merged so far."""

    @classmethod
    def of(cls, weights: Weights) -> "WeightsBlob":
        """Write tensors by model and name, each of them straight to its place."""
        named = [(f"{model}/{name}", tensor) for model, tensors in weights.items() for name, tensor in tensors.items()]
        # The widest first: then each of them lies at a multiple of its element's size.
        flat = dict(sorted(named, key=lambda item: -item[1].dtype.itemsize))
        for name, tensor in flat.items():
            if tensor.dtype not in _NAMES:
                raise WeightsError(f"{name} is {tensor.dtype}, which safetensors cannot hold; convert it first")
        header, file = make_header((name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in flat.items())
        blob = cls(file.size_bytes)
        blob.buffer[: len(header)] = header
        blob.tensors = by_model(file.tensors)
        with torch.no_grad():
            for name, tensor in flat.items():
                _view(blob.buffer, file.data_start, file.tensors[name]).copy_(tensor)
        return blob

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "WeightsBlob":
        return cls.joined((data,)).check()

    @classmethod
    def joined(cls, pieces: Sequence[bytes | memoryview]) -> "WeightsBlob":
        """Copy a file that comes in pieces. It is not checked yet."""
        blob = cls(sum(len(piece) for piece in pieces))
        at = 0
        for piece in pieces:
            blob.buffer[at : at + len(piece)] = piece
            at += len(piece)
        return blob

    @property
    def buffer(self) -> memoryview:
        """The file's bytes, writable until it is published."""
        return self.memory.buffer[: self.size_bytes]

    def check(self, default_model: str = MAIN_MODEL, *, header: TensorFile | None = None) -> "WeightsBlob":
        """Read the header (of these bytes, if the caller has parsed it): sets `tensors`; those without a model's name
        are the default model's. Whether they fit the policy is for `publish` to say. Raises MalformedWeights.
        """
        self.tensors = by_model((header or read_header(self.buffer)).tensors, default_model)
        self.default_model = default_model
        return self

    @property
    def specs(self) -> dict[str, dict[str, TensorSpec]]:
        return {
            model: {
                name: TensorSpec(shape=entry.shape, dtype=TORCH_NAMES[entry.dtype]) for name, entry in entries.items()
            }
            for model, entries in self.tensors.items()
        }

    def check_finite(self) -> None:
        """Refuse to publish NaN and infinite values. One pass over the memory. Raises NonfiniteWeights."""
        check_finite(
            self.weights(),
            "nothing was published. Check the learner's last update, or set policy.allowNonfinite in the manifest",
        )

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views of the memory, by model and name; they keep it alive."""
        return read_weights(self.buffer, default_model=self.default_model)


def read_weights(
    data: memoryview, *, default_model: str = MAIN_MODEL, models: Iterable[str] = (), where: str = ""
) -> dict[str, dict[str, torch.Tensor]]:
    """Views of a file's tensors, by model and name, of some models (none: all); they keep its memory alive. Tensors
    without a model's name are the default model's. Raises MalformedWeights, with `where` in the message.
    """
    file = read_header(data, where)
    tensors = by_model(file.tensors, default_model)
    with warnings.catch_warnings() if data.readonly else nullcontext():
        if data.readonly:
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is never written to
        return {
            model: {name: _view(data, file.data_start, entry) for name, entry in tensors[model].items()}
            for model in tuple(models) or tensors
        }


def to_bytes(weights: Weights) -> bytes:
    return bytes(WeightsBlob.of(weights).buffer)


def in_models(weights: Publishable) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by model and name, of modules or state dicts. Raises WeightsError where something is not a tensor."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in tensors_by_name(weights)[0].items():
        if isinstance(value, np.ndarray):
            try:
                tensors[name] = torch.from_numpy(value)
            except (TypeError, ValueError) as error:
                raise WeightsError(f'tensor "{name}" has dtype {value.dtype}: {error}') from error
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            told = f'"{name}" is of type {type(value).__name__}, not a tensor; remove it from the state dict'
            raise WeightsError(told)
    return by_model(tensors)


def read_statistics(uri: str) -> Statistics | None:
    """Statistics that the weights in a safetensors file act with, from its metadata; None: it has none."""
    text = read_header(_read(uri), f" in {uri}").metadata.get(STATISTICS)
    try:
        return None if text is None else Statistics.of_document(json.loads(text))
    except (ValueError, StateError) as error:
        raise WeightsError(f"cannot read the statistics of the weights in {uri}: {error}") from error


def read_file(uri: str, *, allow_nonfinite: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Read the weights that a policy starts with, at a path or fsspec URI. Raises WeightsError, NonfiniteWeights."""
    weights = read_weights(_read(uri), where=f" in {uri}")
    if not allow_nonfinite:
        check_finite(weights, f"{uri} was not loaded. Check the run that wrote it, or set policy.allowNonfinite")
    return weights


def _read(uri: str) -> memoryview:
    try:
        with fsspec.open(uri, "rb") as file:
            return memoryview(file.read())
    except FileNotFoundError as error:
        raise WeightsError(f"cannot read weights from {uri}: there is no such file; correct its path") from error
    except (OSError, ValueError, ImportError) as error:
        raise WeightsError(f"cannot read weights from {uri}: {error}") from error


def by_model(flat: Mapping[str, T], default_model: str = MAIN_MODEL) -> dict[str, dict[str, T]]:
    """Group values named `model/name` by model and name; plain names belong to the default model."""
    models: dict[str, dict[str, T]] = {}
    for key, value in flat.items():
        model, slash, name = key.partition("/")
        if not slash:
            model, name = default_model, key
        if name in models.setdefault(model, {}):
            raise MalformedWeights(f'the weights contain {model}/{name} twice: as "{name}" and as "{model}/{name}"')
        models[model][name] = value
    return models


def _view(buffer: memoryview, data_start: int, entry: TensorEntry) -> torch.Tensor:
    dtype, size = _TORCH[entry.dtype], entry.end - entry.begin
    if not size:
        return torch.empty(entry.shape, dtype=dtype)
    whole = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=data_start + entry.begin)
    # Others' files may begin a tensor anywhere; torch wants it at a multiple of its element's size.
    aligned = whole if whole.data_ptr() % dtype.itemsize == 0 else whole.clone()
    return aligned.view(dtype).reshape(entry.shape)
