"""Tensors of a safetensors file as numpy arrays, and the format's names of dtypes. Nothing here imports torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cormorant_contract.tensor_file import TensorEntry, TensorFile

Array = npt.NDArray[Any]

NUMPY_BY_NAME: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
"""What numpy can hold; BF16 and the 8-bit floats need torch."""

NAME_BY_NUMPY: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_BY_NAME.items()}


def view(data: memoryview, file: TensorFile, entry: TensorEntry) -> Array:
    """One tensor of a file as an array over the file's bytes."""
    return array_at(data, entry.dtype, entry.shape, file.data_start + entry.begin)


def array_at(data: memoryview, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
    """An array over bytes that begin somewhere in a buffer; a copy where they begin at an odd address.

    Raises:
        KeyError: numpy has no such dtype.
        ValueError: the buffer ends before the array does.
    """
    count = int(np.prod(shape, dtype=np.int64))
    found = np.frombuffer(data, NUMPY_BY_NAME[dtype], count=count, offset=offset).reshape(shape)
    return found if found.flags.aligned else found.copy()
