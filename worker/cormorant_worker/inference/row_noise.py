"""Random numbers of a row that do not depend on the rows it meets in a batch.

Each row brings a 64-bit word of its worker's stream. Inside a `RowNoise`, torch's random functions fill the rows of a
batch from these words: number j of the c-th draw of an act is a hash of (word, c, j), by splitmix64 (Steele, Lea and
Flood, OOPSLA 2014). Draws whose first dimension is not the batch's, draws with a generator of their own and random
functions that are not listed below take numbers of the server's own stream.

# N rows of a batch, padding among them; k numbers a row
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from cormorant_worker.spaces import Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class RowNoise(TorchFunctionMode):
    """Use as a context manager around each act, after `begin`. Owned by one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._words: Array = np.zeros(0, dtype=np.uint64)
        self._draws = 0

    def begin(self, words: Array) -> None:
        """The next act is for these rows: [N] uint64."""
        self._words, self._draws = words, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        draw = _DRAWS.get(func)
        if draw is not None and (kwargs is None or kwargs.get("generator") is None):
            drawn = draw(self, *args, **(kwargs or {}))
            if drawn is not None:
                return drawn
        return func(*args, **(kwargs or {}))

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether these are the batch's rows."""
        return len(shape) > 0 and shape[0] == len(self._words)

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """[N, ...] float64 on the CPU, inside (0, 1)."""
        k = math.prod(shape[1:])
        self._draws += 1
        with np.errstate(over="ignore"):
            rows = _mix(self._words + np.uint64(self._draws) * _FACTORS[0])
            bits = _mix(rows[:, None] + np.arange(1, k + 1, dtype=np.uint64) * _GOLDEN)
        return torch.from_numpy(((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53).reshape(tuple(shape))


def _mix(z: Array) -> Array:
    z = (z ^ (z >> np.uint64(30))) * _FACTORS[0]
    z = (z ^ (z >> np.uint64(27))) * _FACTORS[1]
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def _shape_of(size: Sequence[Any]) -> tuple[int, ...]:
    """The shape in `rand(2, 3)` and in `rand((2, 3))`."""
    if len(size) == 1 and not isinstance(size[0], int):
        return tuple(size[0])
    return tuple(size)


def _below_one(uniform: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In [0, 1) after rounding, too."""
    return uniform if dtype == torch.float64 else torch.floor(uniform * 2.0**24).mul(2.0**-24).to(dtype)


def _normal(noise: RowNoise, shape: Sequence[int]) -> torch.Tensor:
    drawn: torch.Tensor = torch.special.ndtri(noise.uniform(shape))
    return drawn


def _gumbel(noise: RowNoise, shape: Sequence[int]) -> torch.Tensor:
    return -torch.log(-torch.log(noise.uniform(shape)))


def _made(drawn: torch.Tensor, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
    return drawn.to(device=device, dtype=dtype or torch.get_default_dtype())


def _rand(noise: RowNoise, *size: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor | None:
    shape = _shape_of(kwargs.get("size", size))
    dtype = dtype or torch.get_default_dtype()
    return _made(_below_one(noise.uniform(shape), dtype), dtype, device) if noise.covers(shape) else None


def _randn(noise: RowNoise, *size: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor | None:
    shape = _shape_of(kwargs.get("size", size))
    return _made(_normal(noise, shape), dtype, device) if noise.covers(shape) else None


def _rand_like(noise: RowNoise, x: torch.Tensor, *, dtype: Any = None, **_: Any) -> torch.Tensor | None:
    return _rand(noise, tuple(x.shape), dtype=dtype or x.dtype, device=x.device)


def _randn_like(noise: RowNoise, x: torch.Tensor, *, dtype: Any = None, **_: Any) -> torch.Tensor | None:
    return _randn(noise, tuple(x.shape), dtype=dtype or x.dtype, device=x.device)


def _randint(noise: RowNoise, *args: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """`randint(high, size)` and `randint(low, high, size)`."""
    given = list(args)
    low = kwargs.get("low", given.pop(0) if len(given) == 3 or (len(given) == 2 and "size" in kwargs) else 0)
    high = kwargs["high"] if "high" in kwargs else given.pop(0)
    shape = tuple(kwargs["size"] if "size" in kwargs else given.pop(0))
    if not noise.covers(shape):
        return None
    drawn: torch.Tensor = (noise.uniform(shape) * (high - low)).floor().add(low)
    return drawn.to(device=device, dtype=dtype or torch.int64)


def _randint_like(noise: RowNoise, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    dtype = kwargs.pop("dtype", None) or x.dtype
    bounds = {name: kwargs[name] for name in ("low", "high") if name in kwargs}
    return _randint(noise, *args, size=tuple(x.shape), dtype=dtype, device=x.device, **bounds)


def _normal_of(noise: RowNoise, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **_: Any) -> torch.Tensor | None:
    given = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    shape = tuple(size) if size is not None else torch.broadcast_shapes(*(value.shape for value in given))
    if not noise.covers(shape):
        return None
    like = given[0] if given else torch.empty(0)
    drawn: torch.Tensor = _normal(noise, shape).to(like.device, like.dtype) * std + mean
    return drawn


def _bernoulli(noise: RowNoise, x: torch.Tensor, p: float | None = None, **_: Any) -> torch.Tensor | None:
    if not noise.covers(x.shape):
        return None
    chance = x if p is None else torch.full_like(x, p)
    return (noise.uniform(x.shape).to(x.device) < chance).to(x.dtype)


def _multinomial(
    noise: RowNoise, x: torch.Tensor, num_samples: int, replacement: bool = False, **_: Any
) -> torch.Tensor | None:
    """By the Gumbel-max trick, with the k largest of a row where nothing is put back."""
    if x.dim() != 2 or not noise.covers(x.shape):
        return None
    logits = x.double().log()
    if not replacement:
        return (logits + _gumbel(noise, x.shape).to(x.device)).topk(num_samples, -1).indices
    shape = (x.shape[0], num_samples, x.shape[1])
    return (logits.unsqueeze(1) + _gumbel(noise, shape).to(x.device)).argmax(-1)


def _exponential_(noise: RowNoise, x: torch.Tensor, lambd: float = 1.0, **_: Any) -> torch.Tensor | None:
    return x.copy_(-torch.log(noise.uniform(x.shape)) / lambd) if noise.covers(x.shape) else None


def _uniform_(noise: RowNoise, x: torch.Tensor, *bounds: float, **kwargs: Any) -> torch.Tensor | None:
    low, high = (*bounds, kwargs.get("from", 0.0), kwargs.get("to", 1.0))[:2] if len(bounds) != 1 else (bounds[0], 1.0)
    return x.copy_(_below_one(noise.uniform(x.shape), x.dtype) * (high - low) + low) if noise.covers(x.shape) else None


def _normal_(noise: RowNoise, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor | None:
    return x.copy_(_normal(noise, x.shape) * std + mean) if noise.covers(x.shape) else None


def _bernoulli_(noise: RowNoise, x: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor | None:
    return x.copy_(noise.uniform(x.shape).to(x.device) < p) if noise.covers(x.shape) else None


_DRAWS: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.rand: _rand,
    torch.randn: _randn,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.normal: _normal_of,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    torch.Tensor.exponential_: _exponential_,
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.normal_: _normal_,
    torch.Tensor.bernoulli_: _bernoulli_,
}
