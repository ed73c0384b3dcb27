"""Weights as safetensors bytes: the one format that crosses processes, files and the network. Never pickle.

One model's tensors carry their state dict's names; several models are told apart by a prefix: `policy/heads.weight`.
"""

import json
from collections.abc import Mapping
from typing import Any

import fsspec
import torch

from cormorant_worker.errors import StateError, WeightsError
from cormorant_worker.normalize.moments import Statistics
from cormorant_worker.weights.blob import WeightsBlob, by_model, read_weights
from cormorant_worker.weights.staged import Weights, check_finite, is_extra_state

STATISTICS = "cormorant_statistics"
"""Key of a file's metadata: the statistics that its weights act with, as JSON."""
_LONGEST_HEADER = 100_000_000
"""As in safetensors."""


def to_bytes(weights: Weights) -> bytes:
    return bytes(WeightsBlob.of(weights).buffer)


def in_models(weights: Mapping[str, torch.Tensor] | Weights) -> Weights:
    """A state dict, or state dicts by model name, by model name."""
    weights = _published(weights)
    if all(isinstance(value, torch.Tensor) for value in weights.values()):
        return by_model(weights)
    if not all(isinstance(value, Mapping) for value in weights.values()):
        raise WeightsError("weights must be a state dict (tensors by name) or state dicts by model name")
    return weights


def _published(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what modules' `get_extra_state` added."""
    return {
        name: _published(value) if isinstance(value, Mapping) else value
        for name, value in weights.items()
        if not is_extra_state(name)
    }


def read_statistics(uri: str) -> Statistics | None:
    """What the weights in a safetensors file act with, from its metadata; None: it does not say."""
    try:
        with fsspec.open(uri, "rb") as file:
            length = file.read(8)
            header = json.loads(file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER)))
        found = header.get("__metadata__", {}).get(STATISTICS)
        return None if found is None else Statistics.of_document(json.loads(found))
    except (OSError, ValueError, ImportError, AttributeError, StateError) as error:
        raise WeightsError(f"cannot read the statistics of the weights in {uri}: {error}") from error


def read(uri: str, *, allow_nonfinite: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Read the weights that a policy starts with from a safetensors file: a path or any fsspec URI.

    Raises:
        WeightsError: the file cannot be read.
        NonfiniteWeights: values are NaN or infinite, and that is not allowed.
    """
    try:
        with fsspec.open(uri, "rb") as file:
            data = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise WeightsError(f"cannot read weights from {uri}: {error}") from error
    weights = read_weights(memoryview(data))
    if not allow_nonfinite:
        check_finite(weights, f"{uri} was not loaded. Check the run that wrote it, or set policy.allowNonfinite")
    return weights
