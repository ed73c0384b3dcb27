"""The user's policy: found by its import path, built by its factory. Called by `build.py` in every worker.

A factory is `factory(observation_space, action_space, **kwargs)` and returns one of

- a TensorDictModule (tensordict's or TorchRL's): reads and writes batch keys;
- a torch module or a plain callable: takes the observation (a tensor `[n, ...]`, nested like the space) and returns
  the action, or a mapping with "action" and whatever else is to be stored;
- a mapping of named modules with "policy" among them: that one acts, all of them take published weights.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cormorant_worker.errors import PolicyLoadError
from cormorant_worker.spaces import Space

Acting = Callable[..., Any]

MAIN_MODEL = "policy"


@dataclass(frozen=True, slots=True)
class PolicyModels:
    """What a factory returned: the callable that acts, and the modules that take weights, by name."""

    acting: Acting
    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)


def load_policy(entrypoint: str, kwargs: Mapping[str, Any], observation: Space, action: Space) -> PolicyModels:
    """Import a factory and build the policy for an environment's spaces.

    Args:
        entrypoint: "package.module:attribute".
        kwargs: passed to the factory by name.

    Raises:
        PolicyLoadError: the path cannot be imported, the factory raised, or it returned something else.
    """
    factory = _import(entrypoint)
    try:
        made = factory(observation, action, **kwargs)
    except Exception as error:  # the user's own code: whatever it raises is reported as its failure
        raise PolicyLoadError(
            f"the policy factory {entrypoint} raised {type(error).__name__}: {error} "
            f"(called with observation_space={observation}, action_space={action}, kwargs={dict(kwargs)})"
        ) from error
    return wrap_policy(made, entrypoint)


def wrap_policy(made: object, source: str) -> PolicyModels:
    """Sort what a factory returned into what acts and what takes weights.

    Raises:
        PolicyLoadError: it is neither a module, a callable, nor a mapping of modules with "policy".
    """
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


def _import(entrypoint: str) -> Callable[..., Any]:
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute:
        raise PolicyLoadError(f'policy entrypoint "{entrypoint}" is not of the form "package.module:factory"')
    if module_name == "__main__":
        raise PolicyLoadError(
            f"policy entrypoint {entrypoint} names the script itself, which workers do not import; move {attribute} to "
            "a module beside the manifest, or pass the object: open_fleet(env=..., policy_factory=...)"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PolicyLoadError(
            f"cannot import {module_name} of policy entrypoint {entrypoint}: {error}; "
            "is its folder on PYTHONPATH (`cormorant run` adds the manifest's folder)?"
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PolicyLoadError(f"{module_name} has no {attribute}, named in policy entrypoint {entrypoint}")
        found = getattr(found, part)
    if not callable(found):
        raise PolicyLoadError(f"{entrypoint} is a {type(found).__name__}; a policy factory must be callable")
    return found  # type: ignore[no-any-return]  # checked to be callable; what it returns is checked by wrap_policy
