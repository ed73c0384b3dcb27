"""Paths of attributes, as TorchRL's `cascade_execute` takes them: `fleet.stats`, `schemes['policy'].receive`."""

import re
from typing import Any

_STEP = re.compile(r"""\.?([A-Za-z_]\w*)|\[(?:'([^']*)'|"([^"]*)"|(-?\d+))\]""")


def find(root: object, path: str) -> Any:
    found: Any = root
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            raise AttributeError(f'the path "{path}" cannot be read at "{path[at:]}"; write it as a.b["c"].d')
        name, single, double, number = step.groups()
        try:
            if name is not None:
                found = getattr(found, name)
            else:
                found = found[int(number) if number is not None else (single if single is not None else double)]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise AttributeError(
                f'"{path}": {type(found).__name__} has no {step.group().lstrip(".")} ({type(error).__name__})'
            ) from error
        at = step.end()
    return found


def execute(root: object, path: str, *args: Any, **kwargs: Any) -> Any:
    """Call what a path leads to, or read it.

    Raises:
        AttributeError: as `find`.
        ValueError: arguments for what cannot be called.
    """
    found = find(root, path)
    if callable(found):
        return found(*args, **kwargs)
    if args or kwargs:
        raise ValueError(f'"{path}" is a {type(found).__name__}, which takes no arguments; found {args} and {kwargs}')
    return found
