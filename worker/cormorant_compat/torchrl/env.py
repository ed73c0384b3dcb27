"""EnvPool as a TorchRL environment. Imported only where TorchRL is installed; elsewhere that of `pool.py` stands in."""

from typing import Any, Unpack

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded
from torchrl.data import OneHot as OneHotSpec
from torchrl.envs import EnvBase

from cormorant_compat.torchrl.pool import Build, OfPool, OfTask, Pool, PoolOptions
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.spaces import OneHot, Space, put_nested


class MultiThreadedEnvWrapper(OfPool, EnvBase):
    """A pool that `envpool.make` built, of any `env_type`, as a TorchRL environment of batch size [num_envs].

    Do not step the pool elsewhere any more. `disable_env_checker` and `allow_done_after_reset` mean nothing: EnvPool
    has no checker, and is never done after a reset.

    Raises:
        EnvBuildError: it is not a pool, or steps only part of its environments at a time.
        ValueError: a frame_skip below 1, or a device that does not exist.
    """

    def _begin(self, build: Build, **options: Unpack[PoolOptions]) -> None:
        pool = Pool(build, **options)
        device, batch_size = pool.named_device, torch.Size([pool.num_envs])
        EnvBase.__init__(
            self,
            device=device,
            batch_size=batch_size,
            allow_done_after_reset=options.get("allow_done_after_reset", False),
        )
        self.pool = pool
        self.num_workers = pool.num_envs
        nested: dict[str, Any] = {}
        for leaf, space in zip(pool.observation, pool.observation_spaces, strict=True):
            put_nested(nested, leaf.key, _spec_of(space, batch_size, device=device))
        self.observation_spec = _composite(nested, batch_size, device)
        self.action_spec = _spec_of(pool.action_space, batch_size, device=device)
        column = torch.Size([*batch_size, 1])
        self.reward_spec = Unbounded(shape=column, device=device)
        flag = Categorical(2, shape=column, dtype=torch.bool, device=device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=batch_size, device=device
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        self.is_closed = False  # a pool that was closed is built again
        begun = self.pool.begin(None if tensordict is None else tensordict.get("_reset", None))
        flags = {key: spec.zero() for key, spec in self.full_done_spec.items()}
        return TensorDict({**begun, **flags}, batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        led = self.pool.step(tensordict[self.action_key])
        return TensorDict(led, batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.pool.reseed(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        if not self.is_closed:
            self.pool.close()
        super().close(raise_if_closed=raise_if_closed)


class MultiThreadedEnv(OfTask, MultiThreadedEnvWrapper):
    """An EnvPool task as a TorchRL environment.

        env = MultiThreadedEnv(num_workers=3, env_name="Pendulum-v1")
        env.rollout(5)
        env.close()

    "ALE/" before EnvPool's name of the task is dropped. `create_env_kwargs` are EnvPool's own arguments, with `seed`,
    `num_threads` and `max_episode_steps`; the options are those of the wrapper.

    Raises:
        UnknownEnv: EnvPool has no such task; with near matches.
        EnvBuildError: an argument is not known or does not fit.
        ValueError: a frame_skip below 1, or a device that does not exist.
    """


def _composite(nested: dict[str, Any], shape: torch.Size, device: torch.device | None) -> Composite:
    parts = {k: _composite(v, shape, device) if isinstance(v, dict) else v for k, v in nested.items()}
    return Composite(parts, shape=shape, device=device)


def _spec_of(space: Space, batch_size: torch.Size, *, device: torch.device | None) -> TensorSpec:
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
