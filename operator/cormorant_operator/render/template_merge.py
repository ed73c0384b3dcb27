"""Merges `head.template` and `workerGroups[].template` into a pod template.

Objects are merged key by key. Lists of named items are merged by name: containers, volumes, env and ports by `name`,
mounts by `mountPath`. Other lists are replaced. A null removes the key.
"""

from collections.abc import Mapping
from typing import Any

_KEYS = ("name", "mountPath")


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `overlay` into a copy of `base`.

    Example: `merge({"containers": [{"name": "a", "image": "x"}]}, {"containers": [{"name": "a", "tty": True}]})` is
    `{"containers": [{"name": "a", "image": "x", "tty": True}]}`.
    """
    result = dict(base)
    for key, value in overlay.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge_value(result.get(key), value)
    return result


def _merge_value(base: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return merge(base if isinstance(base, Mapping) else {}, value)
    if isinstance(value, list) and isinstance(base, list) and (key := _key_of([*base, *value])):
        return _merge_lists(base, value, key)
    return value


def _key_of(items: list[Any]) -> str:
    # mountPath first: the mounts of one volume share its name.
    for key in reversed(_KEYS):
        if items and all(isinstance(item, Mapping) and key in item for item in items):
            return key
    return ""


def _merge_lists(base: list[Any], overlay: list[Any], key: str) -> list[Any]:
    added = {item[key]: item for item in overlay}
    merged = [merge(item, added.pop(item[key], {})) for item in base]
    return [*merged, *(item for item in overlay if item[key] in added)]
