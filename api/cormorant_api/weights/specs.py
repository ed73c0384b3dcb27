"""The policy's tensors as REST models, and the size limit of their uploads."""

import math
from collections.abc import Mapping

from cormorant_contract.rest.models import TensorShape
from cormorant_contract.tensor_file import ITEM_BYTES, MAX_METADATA_BYTES, TORCH_NAMES
from cormorant_worker.weights.staged import TensorSpec, WeightSpecs

_DTYPES = {attribute: name for name, attribute in TORCH_NAMES.items()}
_HEADER_MARGIN = MAX_METADATA_BYTES + (1 << 20)
_HEADER_PER_TENSOR = 512


def dtype_of(spec: TensorSpec) -> str:
    return _DTYPES.get(spec.dtype, spec.dtype)


def shapes_of(tensors: Mapping[str, TensorSpec]) -> tuple[TensorShape, ...]:
    """A model's specs for the REST API."""
    return tuple(TensorShape(name=n, dtype=dtype_of(spec), shape=spec.shape) for n, spec in tensors.items())


def limit_bytes(specs: WeightSpecs, *, most: int) -> int:
    """Upload limit: twice the expected size, so that weights of another policy get a report of the differences."""
    tensors = [spec for model in specs.values() for spec in model.values()]
    size = sum(ITEM_BYTES.get(dtype_of(spec), 8) * math.prod(spec.shape) for spec in tensors)
    return min(most, 2 * size + _HEADER_MARGIN + _HEADER_PER_TENSOR * len(tensors))
