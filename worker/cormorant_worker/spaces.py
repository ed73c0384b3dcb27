"""Gymnasium spaces as flat tuples of arrays, which the hot loop uses instead of nested dicts.

A space is a tree; its *leaves* are its Box, Discrete, MultiDiscrete and MultiBinary parts. Observations and actions
travel as `Arrays`, one array per leaf, in the order of `leaves(space, prefix)`:

    Dict(pos=Box(3), cam=Tuple(Box(2, 2), Discrete(4)))  ->  cam.0 [n, 2, 2], cam.1 [n], pos [n, 3]
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from cormorant_worker.errors import EnvBuildError

Key = tuple[str, ...]
"""A key of a nested TensorDict, for example `("observation", "cam", "0")`."""

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
"""One array per leaf, in the order of `leaves`."""

Space = gymnasium.Space[Any]


class OneHot(gymnasium.spaces.MultiBinary):
    """Vectors of `n` numbers, exactly one of which is 1: TorchRL's encoding of one of n actions. int64."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.size = n
        self.dtype = np.dtype(np.int64)  # type: ignore[assignment]  # MultiBinary is int8, and TorchRL's are not

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """One of the n vectors; masks are not supported."""
        drawn = np.zeros(self.size, dtype=np.int64)
        drawn[self.np_random.integers(self.size)] = 1
        return drawn

    def __repr__(self) -> str:
        return f"OneHot({self.size})"


class Rooted(gymnasium.spaces.Dict):
    """A Dict whose parts lie at the root of a batch, not under "observation": TorchRL's environments name their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    key: Key
    """Key in a batch, e.g. `("observation",)` or `("observation", "pos")`."""
    shape: tuple[int, ...]
    """The shape for one environment; Discrete has the shape `()`."""
    dtype: np.dtype[Any]
    """The dtype that the space declares; Discrete is int64."""


def leaves(space: Space, prefix: Key) -> tuple[Leaf, ...]:
    """List the leaves of a space, depth first, in its own order; `prefix`: the key of the root, `("observation",)`.
    Raises EnvBuildError for a part without a fixed shape (Text, Graph, Sequence) or without any value (an empty Dict or
    Tuple, a shape with a 0).
    """
    if parts := _parts(space):
        root = prefix[:-1] if isinstance(space, Rooted) else prefix
        return tuple(leaf for name, part in parts for leaf in leaves(part, (*root, name)))
    match space:
        case gymnasium.spaces.Discrete():
            return (Leaf(key=prefix, shape=(), dtype=np.dtype(space.dtype)),)
        case gymnasium.spaces.Box() | gymnasium.spaces.MultiDiscrete() | gymnasium.spaces.MultiBinary():
            if np.prod(space.shape):
                return (Leaf(key=prefix, shape=tuple(space.shape), dtype=np.dtype(space.dtype)),)
            parts = []
    if parts is not None:
        raise EnvBuildError(
            f"the space {space} at {'.'.join(prefix) or 'its root'} has no values; wrap the environment to remove it"
        )
    raise EnvBuildError(
        f"the space {space}{' at ' if prefix else ''}{'.'.join(prefix)} has no fixed shape; "
        "Box, Discrete, MultiDiscrete, MultiBinary, Tuple and Dict are supported: wrap the environment (for example in "
        "gymnasium.wrappers.TransformObservation) to encode it as one of them, padded to a fixed length"
    )


def zeros(parts: Iterable[Leaf], n: int) -> Arrays:
    """Zeros in the leaves of n environments: [n, ...] each."""
    return tuple([np.zeros((n, *leaf.shape), leaf.dtype) for leaf in parts])


def leaf_spaces(space: Space) -> tuple[Space, ...]:
    """The parts of a space that are its leaves, in the order of `leaves`."""
    parts = _parts(space)
    return (space,) if parts is None else tuple(leaf for _, part in parts for leaf in leaf_spaces(part))


def with_leaves(space: Space, parts: Iterator[Space]) -> Space:
    """A space nested like this one, whose leaves are `parts`, in the order of `leaves`."""
    if isinstance(space, gymnasium.spaces.Dict):
        return type(space)({name: with_leaves(part, parts) for name, part in space.spaces.items()})
    if isinstance(space, gymnasium.spaces.Tuple):
        return gymnasium.spaces.Tuple([with_leaves(part, parts) for part in space.spaces])
    return next(parts)


def _parts(space: Space) -> list[tuple[str, Space]] | None:
    """The names and spaces within a Dict or Tuple; None: it is a leaf."""
    if isinstance(space, gymnasium.spaces.Dict):
        return [(str(name), part) for name, part in space.spaces.items()]
    if isinstance(space, gymnasium.spaces.Tuple):
        return [(str(i), part) for i, part in enumerate(space.spaces)]
    return None


def _stored(space: Space, value: Any) -> Array:
    array = np.asarray(value)
    return array if array.dtype == space.dtype else cast_exactly(array, np.dtype(space.dtype))


def flatten(space: Space, value: Any, leaf: Callable[[Space, Any], Any] = _stored) -> Arrays:
    """Turn one nested value of a space into its leaves: `leaf` of each, which makes it an array in the space's dtype,
    without a copy where it already is one. Raises ValueError where a value cannot be stored as it is.
    """
    match space:
        case gymnasium.spaces.Dict():
            return tuple(a for name, part in space.spaces.items() for a in flatten(part, value[name], leaf))
        case gymnasium.spaces.Tuple():
            return tuple(a for part, child in zip(space.spaces, value, strict=True) for a in flatten(part, child, leaf))
    return (leaf(space, value),)


def cast_exactly(array: Array, dtype: np.dtype[Any]) -> Array:
    """Cast to the dtype of a space. Floats are rounded but never become infinite; integers and flags keep their values.
    Raises ValueError or OverflowError where a value does not fit.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f" and np.can_cast(array.dtype, dtype):
        return cast
    changed = np.flatnonzero((cast != array) & (np.isinf(cast) if dtype.kind == "f" else True))
    if changed.size:
        before, after = array.reshape(-1)[changed[0]], cast.reshape(-1)[changed[0]]
        raise ValueError(f"{before} ({array.dtype.name}) would be stored as {after} ({dtype.name})")
    return cast


def unflattener(space: Space) -> Callable[[Sequence[Any]], Any]:
    """The inverse of `flatten` for one space, built in advance so that steps do not inspect types. Discrete parts of a
    single environment (arrays of shape `()`) become Python ints.
    """
    position = 0

    def plan(part: Space) -> Callable[[Sequence[Any]], Any]:
        nonlocal position
        if isinstance(part, gymnasium.spaces.Dict):
            named = [(name, plan(child)) for name, child in part.spaces.items()]
            return lambda arrays: {name: build(arrays) for name, build in named}
        if isinstance(part, gymnasium.spaces.Tuple):
            children = [plan(child) for child in part.spaces]
            return lambda arrays: tuple(build(arrays) for build in children)
        index = position
        position += 1
        if isinstance(part, gymnasium.spaces.Discrete):
            return lambda arrays: arrays[index].item() if not arrays[index].shape else arrays[index]
        return lambda arrays: arrays[index]

    return plan(space)


def map_arrays(change: Callable[[Any], Any], values: Any) -> Any:
    """`change` each array of nested mappings and tuples."""
    if isinstance(values, Mapping):
        return {key: map_arrays(change, value) for key, value in values.items()}
    return tuple(map_arrays(change, value) for value in values) if isinstance(values, tuple) else change(values)


def put(stored: Arrays, at: Any, values: Arrays) -> None:
    """Write values of the same leaves at an index: `stored[i][at] = values[i]`."""
    for array, value in zip(stored, values, strict=True):
        array[at] = value


def writable(array: Array) -> Array:
    """The same memory, without the read-only flag, of which torch knows nothing and warns. For arrays with one reader:
    Ray's objects, and shards, which are mapped copy-on-write (`LocalStore.open`).
    """
    if array.flags.writeable:
        return array
    interface = array.__array_interface__ | {"data": (array.ctypes.data, False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=array))  # which keeps the array alive


def put_nested(target: dict[str, Any], key: Key, value: Any) -> None:
    """Set a value in nested dicts, creating missing ones."""
    for part in key[:-1]:
        target = target.setdefault(part, {})
    target[key[-1]] = value


def describe(space: Space) -> str:
    """Describe a space in one line, equal in every process and version: used in fingerprints and messages. Bounds are
    given by their extremes, so that a 4x84x84 Box stays readable.
    """
    match space:
        case OneHot():
            return f"OneHot({space.n})"
        case gymnasium.spaces.Dict():
            return "Dict(" + ", ".join(f"{k}={describe(v)}" for k, v in space.spaces.items()) + ")"
        case gymnasium.spaces.Tuple():
            return "Tuple(" + ", ".join(describe(v) for v in space.spaces) + ")"
        case gymnasium.spaces.Box():
            low, high = float(np.min(space.low)), float(np.max(space.high))
            return f"Box({low:g}, {high:g}, {tuple(space.shape)}, {np.dtype(space.dtype).name})"
        case gymnasium.spaces.Discrete():
            start = f", start={int(space.start)}" if int(space.start) else ""
            return f"Discrete({int(space.n)}{start})"
        case gymnasium.spaces.MultiDiscrete():
            return f"MultiDiscrete({space.nvec.tolist()})"
        case gymnasium.spaces.MultiBinary():
            return f"MultiBinary({tuple(space.shape)})"
    return str(space)
