"""Gymnasium spaces as JSON: in the description of a dataset, and in the head's answer to learners."""

from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Space = gymnasium.Space[Any]


def space_to_json(space: Space) -> dict[str, Any]:
    """Write a space as JSON that can be read without gymnasium. Bounds that are equal everywhere are written once.

    Raises:
        ValueError: it has no fixed shape.
    """
    match space:
        case gymnasium.spaces.Dict():
            return {"type": "Dict", "spaces": [[str(name), space_to_json(part)] for name, part in space.spaces.items()]}
        case gymnasium.spaces.Tuple():
            return {"type": "Tuple", "spaces": [space_to_json(part) for part in space.spaces]}
        case gymnasium.spaces.Box():
            shape = {"shape": list(space.shape), "dtype": np.dtype(space.dtype).name}
            return {"type": "Box", **shape, "low": _bound(space.low), "high": _bound(space.high)}
        case gymnasium.spaces.Discrete():
            discrete = {"n": int(space.n), "start": int(space.start), "dtype": np.dtype(space.dtype).name}
            return {"type": "Discrete", **discrete}
        case gymnasium.spaces.MultiDiscrete():
            many = {"nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": np.dtype(space.dtype).name}
            return {"type": "MultiDiscrete", **many}
        case gymnasium.spaces.MultiBinary():
            return {"type": "MultiBinary", "shape": list(space.shape)}
    raise ValueError(f"the space {space} has no fixed shape and cannot be written as JSON; wrap the environment")


def space_from_json(value: dict[str, Any]) -> Space:
    """The space that `space_to_json` described.

    Raises:
        ValueError: a type that this version does not know.
    """
    spaces = gymnasium.spaces
    match value["type"]:
        case "Dict":
            return spaces.Dict(OrderedDict((name, space_from_json(part)) for name, part in value["spaces"]))
        case "Tuple":
            return spaces.Tuple([space_from_json(part) for part in value["spaces"]])
        case "Box":
            shape, dtype = tuple(value["shape"]), np.dtype(value["dtype"])
            low, high = _array(value["low"], shape, dtype), _array(value["high"], shape, dtype)
            return spaces.Box(low, high, shape, dtype.type)
        case "Discrete":
            return spaces.Discrete(value["n"], start=value["start"], dtype=np.dtype(value["dtype"]).type)
        case "MultiDiscrete":
            dtype = np.dtype(value["dtype"])
            return spaces.MultiDiscrete(np.array(value["nvec"]), dtype.type, start=np.array(value["start"]))
        case "MultiBinary":
            return spaces.MultiBinary(value["shape"][0] if len(value["shape"]) == 1 else value["shape"])
    raise ValueError(f"{value['type']!r} is not a type of space that this version knows; install the newer release")


def _bound(values: Array) -> Any:
    """JSON has no infinity: it is written as a string, "inf" or "-inf"."""
    if values.size and (values == values.flat[0]).all():
        return _number(values.flat[0].item())
    return [_number(value) for value in values.reshape(-1).tolist()]


def _number(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


def _array(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if isinstance(value, list):
        return np.array([float(v) if isinstance(v, str) else v for v in value], dtype=dtype).reshape(shape)
    return np.full(shape, float(value) if isinstance(value, str) else value, dtype=dtype)
