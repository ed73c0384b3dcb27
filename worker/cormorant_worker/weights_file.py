"""Weights as safetensors bytes: the one format that crosses processes, files and the network. Never pickle.

One model's tensors carry their state dict's names; several models are told apart by a prefix: `policy/heads.weight`.
"""

from collections.abc import Mapping

import fsspec
import safetensors
import safetensors.torch
import torch

from cormorant_worker.errors import WeightsError
from cormorant_worker.policy import MAIN_MODEL
from cormorant_worker.weights import Weights

_PICKLE_MAGIC = (b"\x80", b"PK\x03\x04")


def to_bytes(weights: Weights) -> bytes:
    """Serialise tensors by model and name."""
    flat = {
        f"{model}/{name}": tensor.detach().cpu().contiguous()
        for model, tensors in weights.items()
        for name, tensor in tensors.items()
    }
    data: bytes = safetensors.torch.save(_without_shared_memory(flat))
    return data


def from_bytes(data: bytes) -> dict[str, dict[str, torch.Tensor]]:
    """Read tensors by model and name; names without a prefix belong to the model "policy".

    Raises:
        WeightsError: the bytes are not safetensors.
    """
    try:
        flat = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        # Only now: the length of a safetensors header may begin with the same byte as a pickle.
        if data.startswith(_PICKLE_MAGIC):
            raise WeightsError(
                "the weights are a pickle (torch.save); save them with safetensors.torch.save_file"
            ) from error
        raise WeightsError(f"the weights are not safetensors: {error}") from error
    return by_model(flat)


def by_model(flat: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Group `model/name` tensors by model."""
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in flat.items():
        model, slash, name = key.partition("/")
        if not slash:
            model, name = MAIN_MODEL, key
        weights.setdefault(model, {})[name] = tensor
    return weights


def read(uri: str) -> dict[str, dict[str, torch.Tensor]]:
    """Read a safetensors file from a path or any fsspec URI.

    Raises:
        WeightsError: it cannot be opened, or is not safetensors.
    """
    try:
        with fsspec.open(uri, "rb") as file:
            data = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise WeightsError(f"cannot read weights from {uri}: {error}") from error
    return from_bytes(data)


def _without_shared_memory(flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied weights share memory, which safetensors refuses: write each of them out."""
    seen: set[int] = set()
    result = {}
    for name, tensor in flat.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return result
