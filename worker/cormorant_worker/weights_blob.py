"""Published weights as one safetensors file in shared memory: written once, mapped by every worker, not copied between.

    create -> fill `buffer` -> check -> publish          bytes that come from outside (the head)
    of                              -> publish          tensors of this process

Tensors are named `model/name`; plain names belong to a default model. The file's header alone says whether it fits.
"""

import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch

from cormorant_contract.tensor_file import (
    MalformedTensorFile,
    TensorEntry,
    TensorFile,
    looks_like_pickle,
    make_header,
    parse_header,
)
from cormorant_worker.engine.shared_memory import SharedMemory
from cormorant_worker.errors import MalformedWeights, WeightsError
from cormorant_worker.policy import MAIN_MODEL
from cormorant_worker.weights import TensorSpec, Weights

_TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}

Tensors = Mapping[str, Mapping[str, TensorEntry]]
"""Where each tensor lies, by model, then by name."""


class WeightsBlob:
    """One safetensors file in shared memory. The memory is let go of with the last reference."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = SharedMemory.create(max(1, size_bytes))
        self.size_bytes = size_bytes
        self.default_model = MAIN_MODEL
        self.tensors: Tensors = {}
        """Empty until `check`."""
        self.digest = ""
        """Whoever received the bytes may note theirs here."""
        self._data_start = 0
        weakref.finalize(self, self.memory.close)

    @classmethod
    def create(cls, size_bytes: int) -> "WeightsBlob":
        """Make an empty one; fill `buffer`, then call `check`.

        Raises:
            FleetError: there is no memory for so many bytes.
        """
        return cls(size_bytes)

    @classmethod
    def of(cls, weights: Weights) -> "WeightsBlob":
        """Write tensors by model and name, each of them straight to its place.

        Raises:
            WeightsError: a tensor's dtype has no name in safetensors.
        """
        named = [(f"{model}/{name}", tensor) for model, tensors in weights.items() for name, tensor in tensors.items()]
        # The widest first: then each of them lies at a multiple of its element's size.
        flat = dict(sorted(named, key=lambda item: -item[1].dtype.itemsize))
        for name, tensor in flat.items():
            if tensor.dtype not in _NAMES:
                raise WeightsError(f"{name} is {tensor.dtype}, which safetensors cannot hold; convert it first")
        header, file = make_header((name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in flat.items())
        blob = cls(file.size_bytes)
        buffer = blob.buffer
        buffer[: len(header)] = header
        blob.tensors, blob._data_start = _by_model(file, MAIN_MODEL), file.data_start
        with torch.no_grad():
            for name, tensor in flat.items():
                _view(buffer, file.data_start, file.tensors[name]).copy_(tensor)
        return blob

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "WeightsBlob":
        """Copy and check the bytes of a file.

        Raises:
            MalformedWeights: they are not safetensors.
        """
        blob = cls(len(data))
        blob.buffer[:] = data
        blob.check()
        return blob

    @property
    def buffer(self) -> memoryview:
        """The file's bytes, writable until it is published."""
        return self.memory.buffer[: self.size_bytes]

    def check(self, default_model: str = MAIN_MODEL) -> "WeightsBlob":
        """Read the header: sets `tensors`. Whether they fit the policy is for `publish` to say.

        Args:
            default_model: whose tensors those are that carry no model's name.

        Raises:
            MalformedWeights: the bytes are not safetensors.
        """
        file = _parse(self.buffer)
        self.tensors, self._data_start = _by_model(file, default_model), file.data_start
        self.default_model = default_model
        return self

    @property
    def specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Shapes and dtypes, from the header alone."""
        return {
            model: {
                name: TensorSpec(shape=entry.shape, dtype=str(_TORCH[entry.dtype]).removeprefix("torch."))
                for name, entry in entries.items()
            }
            for model, entries in self.tensors.items()
        }

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views of the memory, by model and name; they keep it alive."""
        return _views(self.buffer, self._data_start, self.tensors)


def read_weights(
    data: memoryview, *, default_model: str = MAIN_MODEL, models: Iterable[str] = ()
) -> dict[str, dict[str, torch.Tensor]]:
    """Views of a file's tensors, by model and name; they keep its memory alive.

    Args:
        data: the file.
        default_model: whose tensors those are that carry no model's name.
        models: leave out all others; none = all of them.

    Raises:
        MalformedWeights: the bytes are not safetensors.
    """
    file = _parse(data)
    tensors = _by_model(file, default_model)
    wanted = tuple(models) or tuple(tensors)
    return _views(data, file.data_start, {model: tensors[model] for model in wanted})


def _parse(data: memoryview) -> TensorFile:
    try:
        return parse_header(data)
    except MalformedTensorFile as error:
        # Only now: the length of a safetensors header may begin with the same bytes as a pickle.
        if looks_like_pickle(bytes(data[:8])):
            raise MalformedWeights(
                "the weights are a pickle (torch.save); save them with safetensors.torch.save_file", is_pickle=True
            ) from error
        raise MalformedWeights(f"the weights are not safetensors: {error}", offset=error.offset) from error


def _by_model(file: TensorFile, default_model: str) -> dict[str, dict[str, TensorEntry]]:
    found: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in file.tensors.items():
        model, slash, name = key.partition("/")
        if not slash:
            model, name = default_model, key
        if name in found.setdefault(model, {}):
            raise MalformedWeights(f'the weights hold {model}/{name} twice: as "{name}" and as "{model}/{name}"')
        found[model][name] = entry
    return found


def _views(buffer: memoryview, data_start: int, tensors: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    with warnings.catch_warnings() if buffer.readonly else nullcontext():
        if buffer.readonly:
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
        return {
            model: {name: _view(buffer, data_start, entry) for name, entry in entries.items()}
            for model, entries in tensors.items()
        }


def _view(buffer: memoryview, data_start: int, entry: TensorEntry) -> torch.Tensor:
    dtype, size = _TORCH[entry.dtype], entry.end - entry.begin
    if not size:
        return torch.empty(entry.shape, dtype=dtype)
    whole = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=data_start + entry.begin)
    # Others' files may begin a tensor anywhere; torch wants it at a multiple of its element's size.
    aligned = whole if whole.data_ptr() % dtype.itemsize == 0 else whole.clone()
    return aligned.view(dtype).reshape(entry.shape)
