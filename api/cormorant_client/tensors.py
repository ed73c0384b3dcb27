"""Tensors of a safetensors file as numpy arrays, and the format's names of dtypes. Nothing here imports torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cormorant_contract.tensor_file import NUMPY_NAMES, TensorEntry, TensorFile

Array = npt.NDArray[Any]

NUMPY_BY_NAME: Mapping[str, np.dtype[Any]] = {name: np.dtype(attribute) for name, attribute in NUMPY_NAMES.items()}
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
