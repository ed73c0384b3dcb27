"""TorchRL's ways to give a policy, and weights."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from cormorant_worker.errors import WeightsError

WRAPPED = "module."
"""Before the names of the weights of a module that `as_policy` wrapped."""
_NAMES = ("tensordict", "td")

Weights: TypeAlias = torch.nn.Module | TensorDictBase | Mapping[str, torch.Tensor]
Number: TypeAlias = int | str | torch.device
"""A collector's number, or the device of its policy."""


class WeightUpdater(Protocol):
    """Its other methods are called where it has them."""

    def push_weights(self, *, policy_or_weights: Any, worker_ids: Any) -> Any: ...


class OnTensorDicts(TensorDictModuleBase):
    """A module or callable that takes a TensorDict and writes "action" into it.

    For a single environment TorchRL gives it frames without a batch dimension, and so does this; a policy that raises
    on the first of them takes a batch of one.
    """

    def __init__(self, module: Callable[[Any], Any]) -> None:
        super().__init__()
        self.in_keys: list[Any] = getattr(module, "in_keys", [])
        self.out_keys: list[Any] = getattr(module, "out_keys", ["action"])
        self.module = module
        self._takes_frames: bool | None = None
        """None: not known yet."""

    def forward(self, tensordict: Any) -> Any:
        if len(tensordict) > 1 or self._takes_frames is False:
            return self.module(tensordict)
        try:
            acted = self.module(tensordict[0]).unsqueeze(0)
        except Exception:  # whatever the user's own code raises without a batch dimension
            if self._takes_frames:
                raise
            self._takes_frames = False
            return self.module(tensordict)
        self._takes_frames = True
        return acted


def as_policy(policy: Any, *, is_trusted: bool = False) -> Any:
    """Read a policy as TorchRL's collectors do: None, or a RandomPolicy without a spec, means random actions. A
    TensorDictModule reads and writes keys. Any other module or callable takes the observation and returns the action,
    unless its only argument is named `tensordict` or `td`, or is said to be a TensorDict, or `is_trusted`
    (`trust_policy`) says so. A mapping names several modules, of which "policy" acts.
    """
    if policy is None or (type(policy).__name__ == "RandomPolicy" and policy.action_spec is None):
        return None
    if isinstance(policy, TensorDictModuleBase) and not policy.state_dict():
        return OnTensorDicts(policy)  # no weights: written by hand
    if isinstance(policy, TensorDictModuleBase | Mapping):
        return policy
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(f"the policy is {policy!r}; give a module, a callable, or None for random actions")
    if is_trusted:
        return OnTensorDicts(policy)
    called = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        (only,) = inspect.signature(called, eval_str=True).parameters.values()
        said = only.annotation
        is_trusted = only.name in _NAMES or (isinstance(said, type) and issubclass(said, TensorDictBase))
    except (TypeError, ValueError, NameError):
        pass  # several arguments, or annotations that cannot be read
    return OnTensorDicts(policy) if is_trusted else policy


def call_factory(factory: Callable[[], Any], is_trusted: bool) -> Any:
    """Call a user's policy factory in the worker; what it returns is read as a policy that was given is."""
    return as_policy(factory(), is_trusted=is_trusted)


def read_weights(given: Any, *, policy: Any) -> Mapping[str, torch.Tensor]:
    """A state dict of weights in any of TorchRL's forms, with the wrapper's prefix where `policy`, in use, has it."""
    is_within = isinstance(policy, OnTensorDicts) and not isinstance(given, OnTensorDicts)
    if isinstance(given, nn.Module):
        given = given.state_dict()
    elif isinstance(given, TensorDictBase):
        given = given.flatten_keys(".").to_dict()
    if not isinstance(given, Mapping):
        raise WeightsError(f"weights are a {type(given).__name__}; give a module, a TensorDict or a state dict")
    # Extra state and the like is not tensors.
    if wrong := sorted(str(name) for name, value in given.items() if not isinstance(value, torch.Tensor)):
        raise WeightsError(f"weights {', '.join(wrong)} are not tensors; leave them out")
    tensors = {str(name): value.detach() for name, value in given.items()}
    if is_within:
        tensors = {name if name.startswith(WRAPPED) else WRAPPED + name: value for name, value in tensors.items()}
    return tensors


def on_cpu(policy: Any) -> Any:
    """A policy as it is sent: workers without a GPU must not need one to read it."""
    if isinstance(policy, torch.nn.Module) and any(tensor.is_cuda for tensor in policy.state_dict().values()):
        return copy.deepcopy(policy).cpu()
    return policy
