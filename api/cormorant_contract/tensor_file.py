"""Headers of safetensors files: writing, and strict parsing of what others send. Standard library only.

A file is 8 bytes (the header's length N, little-endian), N bytes of JSON, then the tensors' bytes:

    {"__metadata__": {str: str}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

Format: https://github.com/huggingface/safetensors#format. Bytes cross process borders as views: the library's own
`save` and `load` copy everything.
"""

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Longer headers are refused before they are read: a policy has thousands of tensors at most."""
MAX_METADATA_BYTES = 1 << 20
"""Longest metadata, as JSON, that is published with weights."""
_DTYPES = {
    # the attribute of torch, and of numpy where it has one; bytes of one element
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
"""By the format's name of the dtype."""
ITEM_BYTES = {name: size for name, (_, size) in _DTYPES.items()}
TORCH_NAMES = {name: attribute for name, (attribute, _) in _DTYPES.items()}
NUMPY_NAMES = {name: attribute for name, attribute in TORCH_NAMES.items() if name not in ("F8_E4M3", "F8_E5M2", "BF16")}

_MAX_DIMS = 64
_MAX_BYTES = 2**63 - 1
"""Largest array that numpy and torch can describe, also with a size of 0 among its dimensions."""
_LENGTH_BYTES = 8
_ALIGNMENT = 64
_METADATA = "__metadata__"
_PICKLE_MAGIC = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04", b"\x1f\x8b")


class MalformedTensorFile(ValueError):
    """The bytes are not a safetensors file. `offset` is the position of the error."""

    def __init__(self, message: str, *, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Location of one tensor."""

    dtype: str
    """The format's name, e.g. "F32"."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_start: int
    """Bytes before the first tensor: the length field and the header."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_start + max((entry.end for entry in self.tensors.values()), default=0)


def looks_like_pickle(head: bytes) -> bool:
    """True if these are the first bytes of a file of `torch.save` or `pickle` (zip archive, protocol mark, gzip).

    A safetensors file may begin with the same byte, as the length of its header: bytes that parse are not a pickle.
    """
    return head.startswith(_PICKLE_MAGIC)


def parse_header(data: bytes | bytearray | memoryview, *, file_size: int | None = None) -> TensorFile:
    """Read the header of a safetensors file and check that its tensors fill the rest exactly: no gap, no overlap.

    Args:
        data: the file, or at least its length field and header.
        file_size: bytes of the whole file; by default `len(data)`.

    Raises:
        MalformedTensorFile: the header contradicts itself or the file's size; names the tensor and the values.
    """
    size = len(data) if file_size is None else file_size
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or start > min(size, _LENGTH_BYTES + MAX_HEADER_BYTES):
        raise MalformedTensorFile(
            f"of {size:,} bytes, the header claims {start:,}; at most {MAX_HEADER_BYTES:,} are read"
        )
    document = _load_json(bytes(memoryview(data)[_LENGTH_BYTES:start]))
    metadata = document.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise MalformedTensorFile(f"{_METADATA} must map strings to strings", offset=_LENGTH_BYTES)
    tensors = {name: _checked_entry(name, value, size - start) for name, value in document.items()}
    # Without gaps up to the end of the file: what the reference parser demands.
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            sentence = f'tensor "{name[:80]}" begins at {entry.begin:,}, and the one before it ends at {at:,}'
            raise MalformedTensorFile(sentence, offset=start + at)
        at = entry.end
    if start + at != size:
        sentence = f"the tensors take {at:,} bytes, {size - start:,} follow the header"
        raise MalformedTensorFile(sentence, offset=min(start + at, size))
    return TensorFile(tensors=tensors, metadata=metadata, data_start=start)


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, TensorFile]:
    """Lay tensors out one after another, and write the header for them.

    Args:
        tensors: name, the format's dtype and shape of each, in the order in which their bytes will follow.
        metadata: strings to store in the header.

    Returns:
        The length field and the header, padded so that the tensors begin at a multiple of 64 bytes; and where each
        tensor lies.
    """
    entries: dict[str, TensorEntry] = {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = TensorEntry(dtype=dtype, shape=tuple(shape), begin=offset, end=end)
        offset = end
    document: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for name, entry in entries.items():
        document[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
    text = json.dumps(document, separators=(",", ":")).encode()
    padding = -(_LENGTH_BYTES + len(text)) % _ALIGNMENT
    header = (len(text) + padding).to_bytes(_LENGTH_BYTES, "little") + text + b" " * padding
    return header, TensorFile(tensors=entries, metadata=dict(metadata or {}), data_start=len(header))


def _load_json(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if b"\\u" in text:  # lone surrogates: no reply and no other parser can encode them
            json.dumps(document, ensure_ascii=False).encode()
    except MalformedTensorFile:
        raise
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError among them
        position = getattr(error, "pos", getattr(error, "start", 0))
        raise MalformedTensorFile(f"the header is not JSON: {error}", offset=_LENGTH_BYTES + position) from error
    if not isinstance(document, dict):
        sentence = f"the header is a JSON {type(document).__name__}, not an object"
        raise MalformedTensorFile(sentence, offset=_LENGTH_BYTES)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for key, value in pairs:
        if key in names:
            raise MalformedTensorFile(f'the header names "{key[:80]}" twice', offset=_LENGTH_BYTES)
        names[key] = value
    return names


def _checked_entry(name: str, value: Any, room: int) -> TensorEntry:
    """Check that one tensor lies within the `room` bytes that follow the header.

    Counts and limits come before arithmetic, and messages quote a few items only: a header may hold a million numbers
    of thousands of digits.
    """

    def refuse(what: str) -> MalformedTensorFile:
        return MalformedTensorFile(f'tensor "{name[:80]}": {what}', offset=_LENGTH_BYTES)

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise refuse("must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise refuse(f"dtype {reprlib.repr(dtype)} is not one of {', '.join(sorted(ITEM_BYTES))}")
    if not _are_sizes(shape, most=_MAX_BYTES) or len(shape) > _MAX_DIMS:
        raise refuse(f"shape {reprlib.repr(shape)} must be at most {_MAX_DIMS} integers from 0 to 2**63 - 1")
    if not _are_sizes(offsets, most=room) or len(offsets) != 2:
        raise refuse(
            f"data_offsets {reprlib.repr(offsets)} must be two integers from 0 to {room}, the bytes that follow"
        )
    if math.prod(size for size in shape if size) * ITEM_BYTES[dtype] > _MAX_BYTES:
        raise refuse(f"{dtype} {reprlib.repr(shape)} has more than 2**63 - 1 bytes")
    begin, end = offsets
    wanted = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != wanted:
        raise refuse(f"data_offsets hold {end - begin} bytes; {dtype} {reprlib.repr(shape)} needs {wanted}")
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _are_sizes(values: Any, *, most: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= most for value in values)
