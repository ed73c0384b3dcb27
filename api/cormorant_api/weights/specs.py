"""Checks published tensors: names, shapes and dtypes against the policy's specs."""

import math
from collections.abc import Mapping

from cormorant_api.errors import ApiError
from cormorant_contract.rest.models import TensorShape
from cormorant_contract.rest.problems import Differences, ProblemType
from cormorant_contract.tensor_file import ITEM_BYTES, MAX_METADATA_BYTES, TORCH_NAMES, TensorEntry
from cormorant_worker.weights.staged import TensorSpec, WeightSpecs

_NAMED = 20
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


def check_specs(
    found: Mapping[str, Mapping[str, TensorEntry]], specs: WeightSpecs, *, only: str, is_partial: bool = False
) -> None:
    """Compare every tensor with the policy's specs.

    Args:
        only: the only model allowed; empty: any model of the policy.

    Raises:
        ApiError: 422 with all differences.
    """
    wanted = {only: specs[only]} if only else {name: specs[name] for name in found if name in specs}
    missing, unexpected, shape, dtype = [], [], [], []
    for model, tensors in found.items():
        if model not in wanted:
            unexpected += [f"{model}/{name}" for name in tensors]
    for model, needed in wanted.items():
        tensors = found.get(model, {})
        missing += [f"{model}/{name}" for name in needed if name not in tensors and not is_partial]
        for name, entry in tensors.items():
            spec = needed.get(name)
            if spec is None:
                unexpected.append(f"{model}/{name}")
            elif entry.shape != spec.shape:
                shape.append(f"{model}/{name} is {list(entry.shape)}, not {list(spec.shape)}")
            elif entry.dtype != dtype_of(spec):
                dtype.append(f"{model}/{name} is {entry.dtype}, not {dtype_of(spec)}")
    lists = {"missing": missing, "unexpected": unexpected, "shape": shape, "dtype": dtype}
    if not any(lists.values()):
        if any(found.get(model) or not needed for model, needed in wanted.items()):
            return
        raise ApiError(
            ProblemType.TENSOR_MISMATCH, f"the body contains no tensors; publish one of {', '.join(sorted(specs))}"
        )
    first = next(name for names in lists.values() for name in names)
    counts = ", ".join(f"{len(names)} {what}" for what, names in lists.items() if names)
    raise ApiError(
        ProblemType.TENSOR_MISMATCH,
        f"the tensors do not match the policy ({counts}; first: {first[:200]}); nothing was published",
        **{
            what: Differences(count=len(names), names=tuple(name[:200] for name in names[:_NAMED]))
            for what, names in lists.items()
            if names
        },
    )
