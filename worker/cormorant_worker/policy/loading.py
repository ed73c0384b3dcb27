"""Loads the user's policy by its import path and factory. Called by `build.py` in every worker.

A factory is `factory(observation_space, action_space, **kwargs)` and returns one of

- a TensorDictModule (tensordict's or TorchRL's): reads and writes batch keys;
- a torch module or a plain callable: takes the observation (a tensor `[n, ...]`, nested like the space) and returns
  the action, or a mapping with "action" and whatever else is to be stored;
- a mapping of named modules with "policy" among them: that one acts, all of them take published weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cormorant_worker.entrypoints import load_object
from cormorant_worker.errors import PolicyLoadError
from cormorant_worker.spaces import Space

Acting = Callable[..., Any]

MAIN_MODEL = "policy"


@dataclass(frozen=True, slots=True)
class PolicyModels:
    """A factory's result: the callable that computes actions, and the modules that take weights, by name."""

    acting: Acting
    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)


def load_policy(entrypoint: str, kwargs: Mapping[str, Any], observation: Space, action: Space) -> PolicyModels:
    """Import a factory, "package.module:attribute", and build the policy for an environment's spaces."""
    factory = load_object(entrypoint, what="policy")
    try:
        made = factory(observation, action, **kwargs)
    except Exception as error:  # the user's own code: whatever it raises is reported as its failure
        raise PolicyLoadError(
            f"the policy factory {entrypoint} raised {type(error).__name__}: {error} "
            f"(called with observation_space={observation}, action_space={action}, kwargs={dict(kwargs)})"
        ) from error
    return wrap_policy(made, entrypoint)


def wrap_policy(made: object, source: str) -> PolicyModels:
    """Split a factory's result into the acting callable and the modules that take weights."""
    if isinstance(made, Mapping):
        modules = {str(name): module for name, module in made.items() if isinstance(module, torch.nn.Module)}
        if set(modules) != {str(name) for name in made} or MAIN_MODEL not in modules:
            raise PolicyLoadError(
                f"{source} returned a mapping with {sorted(map(str, made))}; all values must be torch modules and one "
                f'of them must be named "{MAIN_MODEL}"'
            )
        return PolicyModels(modules[MAIN_MODEL], modules)
    if isinstance(made, torch.nn.Module):
        return PolicyModels(made, {MAIN_MODEL: made})
    if callable(made) and not isinstance(made, type):
        return PolicyModels(made)
    raise PolicyLoadError(
        f"{source} returned {type(made).__name__}; return a TensorDictModule, a torch module, a callable, "
        f'or a mapping of modules with "{MAIN_MODEL}"'
    )
