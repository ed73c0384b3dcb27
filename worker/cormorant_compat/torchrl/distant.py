"""`map_fn` and `get_distant_attr`: what collectors' processes have by a path such as `"env.max_steps"`."""

import re
from ast import literal_eval
from collections.abc import Mapping, Sequence
from typing import Any

from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.policy.actor import PolicyActor

_STEP = re.compile(r"""\.?([A-Za-z_]\w*)|\[('[^']*'|"[^"]*"|-?\d+)\]""")
"""One step of a path of attributes: `.stats`, `['policy']`, `[0]`."""


def resolve(root: Any, path: str) -> Any:
    """Follow attributes and items: `"env.transform[0].loc"`. Raises AttributeError where that is not possible."""
    if re.sub(_STEP, "", path):
        raise AttributeError(f'the path "{path}" cannot be read; write it as a.b["c"].d')
    for name, item in _STEP.findall(path):
        try:
            root = getattr(root, name) if name else root[literal_eval(item)]
        except (KeyError, IndexError, TypeError) as error:
            raise AttributeError(f'"{path}": {type(root).__name__} has no [{item}] ({type(error).__name__})') from error
    return root


def execute(root: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """Call what a path leads to, or read an attribute that is not callable."""
    found = resolve(root, path)
    return found(*args, **kwargs) if callable(found) or args or kwargs else found


def execute_in_worker(
    path: str,
    arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    place: WorkerPlace,
    overrides: WorkerOverrides,
    collector: Collector,
) -> Any:
    """Call what a path leads to in a worker, with this collector's `arguments`. Returns what it raised."""
    given, named = arguments[place.index]
    try:
        return execute(_Reachable(place, overrides, collector), path, *given, **named)
    except Exception as error:  # noqa: BLE001  # the script's own code; raised again in its process
        return error


class _Reachable:
    """Where paths begin."""

    def __init__(self, place: WorkerPlace, overrides: WorkerOverrides, collector: Collector) -> None:
        self.worker_idx = place.index
        self.reset = collector.restart
        self.policy = collector.actor.models.acting if isinstance(collector.actor, PolicyActor) else None
        made = [getattr(maker, "made", None) for maker in overrides.envs]
        if None not in made:  # else they step in processes of their own
            self.env = made[0] if len(made) == 1 else made

    def get_distant_attr(self, path: str) -> Any:
        return resolve(self, path)
