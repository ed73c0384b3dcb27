"""The values of `info` that a job stores: declared in its manifest, completed from an environment, and read at every
step into `Step.info`, in the order of the declaration.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cormorant_worker.action_mask import legal_action
from cormorant_worker.envs.gymnasium_env import Env
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.spaces import Array, Key, Leaf, cast_exactly

_MISSING = object()
_NUMBERS = "biuf"
"""Kinds of dtypes that are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoField:
    """One declared key. Pickled for the processes of environments, which do not import the contract."""

    key: str
    """Key in info; with dots, a path into nested dicts."""
    dtype: str = ""
    """Numpy's name; empty: the environment's own."""
    shape: tuple[int, ...] | None = None
    """None: the environment's own."""
    fill: float | None = None
    """Value for a step that lacks the key; None: NaN for floats, else 0."""
    path: Key = ()
    """Its place below `next`; empty: `("info", key)`."""
    agents: tuple[str, ...] = ()
    """Whose values these are, side by side."""

    @property
    def is_complete(self) -> bool:
        return bool(self.dtype) and self.shape is not None

    @property
    def leaf(self) -> Leaf:
        """Leaf of a batch that holds the values, below `next`. The field must be complete."""
        assert self.shape is not None
        return Leaf(key=self.path or ("info", self.key), shape=self.shape, dtype=np.dtype(self.dtype))

    @property
    def filling(self) -> Array:
        """The fill as a value of the dtype."""
        dtype = np.dtype(self.dtype)
        if self.fill is None:
            return np.array(np.nan if dtype.kind == "f" else 0, dtype)
        try:
            return cast_exactly(np.array(self.fill), dtype)
        except ValueError as error:
            raise EnvBuildError(
                f"spec.env.info: fill {self.fill:g} of {self.key} does not fit {self.dtype}; change the fill or the "
                "dtype"
            ) from error

    def complete(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> "InfoField":
        """Fill an undeclared dtype and shape with those of the environment's value."""
        if dtype.kind not in _NUMBERS:
            raise EnvBuildError(
                f"spec.env.info: {self.key} is of type {dtype.name}; numbers, booleans and arrays of them are stored: "
                "convert it in a wrapper, or remove the key"
            )
        if self.shape is not None and self.shape != shape:
            raise EnvBuildError(
                f"spec.env.info: {self.key} has the shape {list(shape)}, declared is {list(self.shape)}; "
                "declare the shape that it has, or none"
            )
        return replace(self, dtype=self.dtype or dtype.name, shape=shape)


def complete_fields(fields: Sequence[InfoField], env: Env, name: str) -> tuple[InfoField, ...]:
    """Find undeclared dtypes and shapes in the infos of a reset and a step. Reset the environment afterwards. An
    environment may have fields of its own, as `own_info`. Raises EnvBuildError where a key occurs in neither, or its
    value cannot be stored.
    """
    fields = (*getattr(env, "own_info", ()), *(field for field in fields if not field.path))
    if all(field.is_complete for field in fields):
        return fields
    actions = deepcopy(env.action_space)
    obs, first = env.reset()
    infos = (env.step(legal_action(actions, obs, first, seed=0))[-1], first)

    def find(key: str) -> Array | None:
        values = (value for info in infos if (value := _find(info, key)) is not _MISSING)
        return next(map(_array, values), None)

    return completed(fields, name, find, known={str(key) for info in infos for key in info})


def completed(
    fields: Sequence[InfoField], name: str, find: Callable[[str], Array | None], *, known: Collection[str]
) -> tuple[InfoField, ...]:
    """Fields, undeclared dtypes and shapes taken from the value that `find` returns. `known`: keys, for the message."""
    whole = []
    for field in fields:
        value = None if field.is_complete else find(field.key)
        if value is None and not field.is_complete:
            raise EnvBuildError(
                f"spec.env.info: {field.key} is in the info of neither the first reset nor the first step of {name}, "
                f"where {', '.join(sorted(known)) or 'nothing'} is; correct the key, or declare its dtype and shape "
                "if it comes later"
            )
        whole.append(field if value is None else field.complete(value.dtype, value.shape))
    return tuple(whole)


class InfoMisfit(Exception):
    """A value of info cannot be stored. The caller adds environment and step to the message."""


def info_writer(fields: Sequence[InfoField], views: Sequence[Array]) -> Callable[[Mapping[str, Any]], None]:
    """A function that writes one environment's info into `views` of its row, one a field. It raises InfoMisfit."""
    plan = [
        (field.key, view, field.filling, *(_exact(view.dtype) if not view.shape else ((), 0.0)))
        for field, view in zip(fields, views, strict=True)
    ]

    def write(info: Mapping[str, Any]) -> None:
        for key, view, filling, exact, largest in plan:
            value = _find(info, key)
            if value is _MISSING:
                view[...] = filling
            elif type(value) in exact and abs(value) <= largest:
                view[...] = value
            else:
                view[...] = _fitting(key, value, view)

    return write


def _exact(dtype: np.dtype[Any]) -> tuple[tuple[type, ...], float]:
    """Types of numbers that a dtype stores without another look, and the largest of them."""
    if dtype.kind == "f":
        return (float, np.float64, dtype.type, int, bool, np.bool_), float(np.finfo(dtype).max)
    return ((bool, np.bool_), 1.0) if dtype.kind == "b" else ((), 0.0)


def _fitting(key: str, value: Any, view: Array) -> Array:
    try:
        array = _array(value)
        if array.dtype.kind in _NUMBERS and array.shape == view.shape:
            return cast_exactly(array, view.dtype)
        why = f"{value!r:.40} of shape {list(array.shape)}"
    except (ValueError, OverflowError) as error:
        why = str(error)
    raise InfoMisfit(
        f"{key} that does not fit {view.dtype.name}{list(view.shape)}: {why}; declare another dtype or shape, or "
        "convert it in a wrapper"
    )


def _array(value: Any) -> Array:
    """The value as an array; whole numbers of more than 64 bits, for which numpy has no dtype, become float64."""
    array = np.asarray(value)
    is_whole = array.dtype.kind == "O" and all(isinstance(item, int) for item in array.flat)
    return array.astype(np.float64) if is_whole else array


def find_info(info: Mapping[str, Any], key: str) -> tuple[Any, Any]:
    """Values of a key or dotted path in the info of a vector (None: no row has it), and [N] bool, the rows with it
    (None: all).
    """
    *path, last = [key] if key in info else key.split(".")
    inner: Any = info
    for part in path:
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return (inner.get(last), inner.get(f"_{last}")) if isinstance(inner, Mapping) else (None, None)


def _find(info: Mapping[str, Any], key: str) -> Any:
    try:
        return info[key]
    except KeyError:
        pass
    except TypeError as error:
        raise InfoMisfit(f"{type(info).__name__} as info; return a dict") from error
    if "." not in key:
        return _MISSING
    value: Any = info
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value
