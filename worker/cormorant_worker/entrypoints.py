"""Imports entrypoints (`package.module:attribute`) of a manifest: environments, their wrappers, policies.

Environment processes import this, so it needs neither torch nor pydantic.
"""

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

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
        loaded: Any = attrgetter(attribute)(importlib.import_module(module_name))
    except Exception as error:
        raise refused(
            f"cannot import the {what} entrypoint {entrypoint}: {type(error).__name__}: {error}; is its module "
            "installed, or in a folder on PYTHONPATH (`cormorant run` adds the manifest's)?"
        ) from error
    if not callable(loaded):
        raise refused(f"{entrypoint} is a {type(loaded).__name__}; the {what} entrypoint must be callable")
    return loaded  # type: ignore[no-any-return]  # whatever the user wrote, and it can be called
