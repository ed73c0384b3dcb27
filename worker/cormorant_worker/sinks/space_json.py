"""Spaces as JSON that can be read without gymnasium, and back. Bounds that are equal everywhere are written once."""

from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np

from cormorant_worker.errors import DatasetError
from cormorant_worker.spaces import Array, Space

Json = dict[str, Any]


def to_json(space: Space) -> Json:
    match space:
        case gymnasium.spaces.Dict():
            return {"type": "Dict", "spaces": [[str(name), to_json(part)] for name, part in space.spaces.items()]}
        case gymnasium.spaces.Tuple():
            return {"type": "Tuple", "spaces": [to_json(part) for part in space.spaces]}
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
    raise DatasetError(f"the space {space} has no fixed shape and cannot be stored; wrap the environment")


def from_json(value: Json) -> Space:
    spaces = gymnasium.spaces
    match value["type"]:
        case "Dict":
            return spaces.Dict(OrderedDict((name, from_json(part)) for name, part in value["spaces"]))
        case "Tuple":
            return spaces.Tuple([from_json(part) for part in value["spaces"]])
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
    raise DatasetError(f"dataset.json names a space of type {value['type']!r}, which this version does not know")


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
