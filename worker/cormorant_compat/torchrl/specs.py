"""Gymnasium's spaces and TorchRL's specs, each as the other. Imported only where TorchRL is installed."""

from typing import Any

import gymnasium
import numpy as np
import torch
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded
from torchrl.data import OneHot as OneHotSpec

from cormorant_worker.errors import EnvBuildError
from cormorant_worker.spaces import OneHot, Rooted, Space

_WIDEST = 2**62 - 1
"""Largest int64 bound: gymnasium cannot sample a Box that is wider than int64."""


def spec_of(space: Space, batch_size: torch.Size, *, device: torch.device | None) -> TensorSpec:
    """The spec of one leaf for a batch of environments."""
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    shape = torch.Size([*batch_size, *(space.shape or ())])
    match space:
        case OneHot():
            return OneHotSpec(space.size, shape=shape, dtype=dtype, device=device)
        case gymnasium.spaces.Discrete():
            # TorchRL's begin at 0; `Pool` adds what they begin with.
            return Categorical(int(space.n), shape=shape, dtype=dtype, device=device)
        case gymnasium.spaces.MultiDiscrete():
            return MultiCategorical(space.nvec.tolist(), shape=shape, dtype=dtype, device=device)
        case gymnasium.spaces.MultiBinary():
            return Binary(shape=shape, dtype=dtype, device=device)
        case gymnasium.spaces.Box():
            low, high = torch.from_numpy(np.array(space.low)), torch.from_numpy(np.array(space.high))
            if low.is_floating_point() and bool((low.isinf() & high.isinf()).all()):
                return Unbounded(shape=shape, dtype=dtype, device=device)
            return Bounded(low.expand(shape), high.expand(shape), shape=shape, dtype=dtype, device=device)
    raise EnvBuildError(f"TorchRL has no spec like {space}; wrap the environment")


def space_of(spec: TensorSpec, num_dims: int, *, parts: type[gymnasium.spaces.Dict] = Rooted) -> Space:
    """The space of one environment, from the spec of a batch with `num_dims` dimensions. `parts`: what a Composite
    becomes; those within it are Dicts. Raises EnvBuildError where it has no fixed shape, or we have nothing like it.
    """
    index, shape = (0,) * num_dims, list(spec.shape[num_dims:])
    if min(shape, default=0) < 0:
        raise EnvBuildError(f"a spec of shape {shape} changes its size; pad it in the environment, and observe a mask")
    match spec:
        case Composite():
            inner = {str(name): part for name, part in spec.items() if not isinstance(part, Composite) or part.keys()}
            return parts({name: space_of(part, num_dims, parts=gymnasium.spaces.Dict) for name, part in inner.items()})
        case OneHotSpec() if len(spec.shape) == num_dims + 1:
            return OneHot(int(spec.space.n))
        case OneHotSpec():
            raise EnvBuildError(
                f"one-hot vectors of shape {shape} cannot be collected; make the actions of "
                "several agents numbers (categorical_actions=True)"
            )
        case MultiCategorical():
            nvec = spec.nvec[index].reshape(shape).numpy()
            return gymnasium.spaces.MultiDiscrete(nvec, dtype=_numpy_type(spec.dtype))
        case Categorical() if spec.dtype is torch.bool:
            return gymnasium.spaces.Box(0, 1, tuple(spec.shape[num_dims:]), np.bool_)
        case Binary() if spec.dtype is torch.int8:
            return gymnasium.spaces.MultiBinary(tuple(spec.shape[num_dims:]))
        case Categorical() if not spec.shape[num_dims:]:
            return gymnasium.spaces.Discrete(int(spec.space.n), dtype=_numpy_type(spec.dtype))
        case Categorical():
            nvec = np.full(tuple(spec.shape[num_dims:]), int(spec.space.n))
            return gymnasium.spaces.MultiDiscrete(nvec, dtype=_numpy_type(spec.dtype))
        case Bounded():
            low, high = (bound[index].cpu().numpy() for bound in (spec.space.low, spec.space.high))
            if low.dtype == np.int64:
                low, high = low.clip(-_WIDEST, _WIDEST), high.clip(-_WIDEST, _WIDEST)
            return gymnasium.spaces.Box(low, high, dtype=low.dtype.type)
        case Unbounded() if spec.dtype.is_floating_point:
            return gymnasium.spaces.Box(-np.inf, np.inf, tuple(spec.shape[num_dims:]), _numpy_type(spec.dtype))
        case Unbounded() if spec.dtype is torch.bool:
            return gymnasium.spaces.Box(0, 1, tuple(spec.shape[num_dims:]), np.bool_)
        case Unbounded():
            info = torch.iinfo(spec.dtype)
            low, high = max(info.min, -_WIDEST), min(info.max, _WIDEST)
            return gymnasium.spaces.Box(low, high, tuple(spec.shape[num_dims:]), _numpy_type(spec.dtype))
    raise EnvBuildError(
        f"a spec of type {type(spec).__name__} cannot be collected; transform it into a tensor, or leave it out "
        "(torchrl.envs.ExcludeTransform)"
    )


def _numpy_type(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype.type
