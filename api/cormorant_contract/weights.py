"""Weights that every fleet can publish: a torch module, its state dict, several of either by model name, or a file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cormorant_contract.errors import MalformedWeights, WeightsError
from cormorant_contract.tensor_file import MalformedTensorFile, TensorFile, looks_like_pickle, parse_header

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class HasStateDict(Protocol):
    """A torch.nn.Module, or a wrapper of one."""

    def state_dict(self) -> Mapping[str, Any]: ...


Tensor: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
Publishable: TypeAlias = (
    HasStateDict
    | Mapping[str, Tensor]
    | Mapping[str, HasStateDict]
    | Mapping[str, Mapping[str, Tensor]]
    | bytes
    | bytearray
    | memoryview
    | str
    | os.PathLike[str]
)
"""A torch module, a state dict (tensors or numpy arrays), a mapping of model names to either, or a safetensors file as
bytes or path."""


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is the result of a module's `get_extra_state`, which may be any object."""
    return name.rpartition(".")[2] == "_extra_state"


def tensors_by_name(weights: Any) -> tuple[dict[str, Any], bool]:
    """Tensors by name, of modules or state dicts, and whether names begin with the model's name: `actor/bias`.
    WeightsError if there are none.
    """
    flat = _state_of(weights)
    has_models = all(isinstance(value, Mapping) or hasattr(value, "state_dict") for value in flat.values())
    if has_models:
        flat = {f"{model}/{name}": value for model, one in flat.items() for name, value in _state_of(one).items()}
    if not flat:
        raise WeightsError("nothing to publish: the state dict is empty")
    return flat, has_models


def file_of(weights: Any) -> memoryview | None:
    """The bytes of a safetensors file if one was given; None for tensors. WeightsError if the file cannot be read or is
    none.
    """
    if isinstance(weights, str | os.PathLike):
        try:
            data = memoryview(Path(weights).read_bytes())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WeightsError(f"cannot read {weights}: {reason}; check the path") from error
        read_header(data, f" in {weights}")
        return data
    if isinstance(weights, bytes | bytearray | memoryview):
        data = memoryview(weights).cast("B")
        read_header(data)
        return data
    return None


def read_header(data: bytes | memoryview, where: str = "") -> TensorFile:
    """Read the header of a safetensors file; MalformedWeights if it is none, with `where` in the message."""
    try:
        return parse_header(data)
    except MalformedTensorFile as error:
        # Only now: the length of a safetensors header may begin with the same bytes as a pickle.
        if looks_like_pickle(bytes(data[:8])):
            raise MalformedWeights(
                f"the weights{where} are a pickle (torch.save); save them with safetensors.torch.save_file"
            ) from error
        raise MalformedWeights(f"the weights{where} are not safetensors: {error}", offset=error.offset) from error


def _state_of(weights: Any) -> dict[str, Any]:
    state = weights.state_dict() if hasattr(weights, "state_dict") else weights
    if not isinstance(state, Mapping):
        raise WeightsError(
            f"a {type(weights).__name__} is not weights; pass a torch module, a state dict, a mapping of model names "
            "to either, or a safetensors file"
        )
    return {str(name): value for name, value in state.items() if not is_extra_state(str(name))}
