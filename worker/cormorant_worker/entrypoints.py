"""Imports entrypoints (`package.module:attribute`) of a manifest: environments, their wrappers, policies.

Environment processes import this, so it needs neither torch nor pydantic.
"""

import importlib
from collections.abc import Callable
from typing import Any

from cormorant_contract.errors import did_you_mean
from cormorant_worker.errors import EnvBuildError, PolicyLoadError


def load_object(entrypoint: str, *, what: str) -> Callable[..., Any]:
    """Import a callable. `what`: "environment", "wrapper" or "policy"; the attribute may have dots.

    Raises:
        EnvBuildError, PolicyLoadError: the form is wrong, the import failed, the attribute is missing or cannot be
            called.
    """
    refused = PolicyLoadError if what == "policy" else EnvBuildError
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute:
        raise refused(f'the {what} entrypoint "{entrypoint}" is not of the form "package.module:attribute"')
    if module_name == "__main__":
        instead = f"env={attribute}" if what != "policy" else f"env=..., policy_factory={attribute}"
        raise refused(
            f"the {what} entrypoint {entrypoint} names the script itself, which workers do not import; move "
            f"{attribute} to a module beside the manifest, or pass the object: open_fleet({instead})"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise refused(
            f"cannot import {module_name} of the {what} entrypoint {entrypoint}: {type(error).__name__}: {error}; "
            "is it installed, or in a folder on PYTHONPATH (`cormorant run` adds the manifest's)?"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, [known for known in vars(found) if not known.startswith("_")])
            raise refused(f"{module_name} has no {attribute}, named in the {what} entrypoint {entrypoint}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise refused(f"{entrypoint} is a {type(found).__name__}; the {what} entrypoint must be callable")
    return found  # type: ignore[no-any-return]  # whatever the user wrote, and it can be called
