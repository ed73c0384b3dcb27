"""TorchRL's environments as our collectors step them, and specs as spaces and back. Imported only where TorchRL is.

# N environments
"""

import traceback
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded
from torchrl.data import OneHot as OneHotSpec

from cormorant_compat.torchrl.batches import FLAGS, REWARDS
from cormorant_worker.envs.protocol import NO_ROWS, Rows, Step, VectorEnv
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvRaised
from cormorant_worker.spaces import Array, Arrays, Leaf, OneHot, Rooted, Space, leaves, put_nested, unflattener

_OBSERVATION = "observation"
_REWARD = Leaf(key=("reward",), shape=(1,), dtype=np.dtype(np.float32))
_WIDEST = 2**62 - 1
"""Largest int64 bound: gymnasium cannot sample a Box that is wider than int64."""


def adapt_torchrl(env: Any) -> Any:
    """A gymnasium.Env if the environment has no batch size and TorchRL's usual keys, else one with a `vector_env`."""
    has_usual_keys = (env.action_keys, env.reward_keys) == (["action"], ["reward"])
    is_single = has_usual_keys and not env.batch_size and _groups(env) == [] and env.reward_spec.shape == (1,)
    return SingleEnv(env) if is_single else BatchedEnv(env)


def _groups(env: Any) -> list[Any]:
    """Keys of flags that belong to a group of agents."""
    return [key for key in env.done_keys if isinstance(key, tuple)]


def _spaces(env: Any) -> tuple[Space, Space]:
    num_dims = len(env.batch_size)
    shown = env.full_observation_spec.clone()
    for key in _groups(env):
        # As observations, they are those of the frame at the root of a batch, and those that followed in `next`.
        shown[key] = env.full_done_spec[key]
    observation = space_of(shown, num_dims)
    assert isinstance(observation, gymnasium.spaces.Dict)
    if list(observation.spaces) == [_OBSERVATION]:
        observation = observation.spaces[_OBSERVATION]
    has_usual_key = env.action_keys == ["action"]
    return observation, space_of(env.full_action_spec["action"] if has_usual_key else env.full_action_spec, num_dims)


def _ends(env: Any, following: Any, num_envs: int) -> tuple[Array, Array]:
    """`terminated` and `truncated`, bool [N]. Flags at the root rule; without them any agent's end is the end."""
    keys = [key for key in env.done_keys if isinstance(key, str)] or _groups(env)
    found: dict[str, Array] = {}
    for key in keys:
        flag = following[key].cpu().numpy().reshape(num_envs, -1).any(1)
        name = key if isinstance(key, str) else key[-1]
        found[name] = found.get(name, False) | flag
    done, terminated, truncated = (found.get(name) for name in FLAGS)
    # Some environments have one of the two flags, or `done` alone.
    assert done is not None
    if truncated is None:
        truncated = np.zeros_like(done) if terminated is None else done & ~terminated
    return (done & ~truncated if terminated is None else terminated), truncated


class SingleEnv(gymnasium.Env[Any, Any]):
    """A TorchRL environment without batch size, as gymnasium's."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.observation_space, self.action_space = _spaces(env)
        self._keys = [leaf.key for leaf in leaves(self.observation_space, (_OBSERVATION,))]
        self._nest = unflattener(self.observation_space)
        self._now: Any = None
        self._has_begun = False
        """The step that ended an episode has begun the next one, which was not asked for yet."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, after setting the seed if there is one."""
        if seed is not None:
            self._env.set_seed(seed)
        if seed is not None or not self._has_begun:
            self._now = self._env.reset()
        self._has_begun = False
        return self._read(self._now), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        spec = self._env.action_spec
        given = torch.as_tensor(np.asarray(action)).to(dtype=spec.dtype, device=spec.device).reshape(spec.shape)
        # What steps carry beside observations (counters, states) stays in the TensorDict.
        stepped, self._now = self._env.step_and_maybe_reset(self._now.set("action", given))
        following = stepped["next"]
        (terminated,), (truncated,) = _ends(self._env, following, 1)
        self._has_begun = bool(terminated | truncated)
        reward = float(following["reward"].item())
        return self._read(following), reward, bool(terminated), bool(truncated), {}

    def close(self) -> None:
        self._env.close(raise_if_closed=False)

    def _read(self, tensordict: Any) -> Any:
        return self._nest([tensordict[key].detach().cpu().numpy() for key in self._keys])


class BatchedEnv(VectorEnv):
    """A TorchRL environment with a batch size, several environments that are stepped in lockstep, or one with keys of
    its own. Rewards that are not one number under "reward" travel as info, for `add_torchrls` to put in their places.
    """

    why_not_saved = "TorchRL's environments have no get_state and set_state"

    def __init__(self, env: Any) -> None:
        self._env = env
        self._seed = 0
        self.num_envs = env.batch_size.numel()
        self.num_workers = self.num_envs
        self.observation_space, self.action_space = _spaces(env)
        self._observation = leaves(self.observation_space, (_OBSERVATION,))
        self._actions = [(leaf.key, env.full_action_spec[leaf.key]) for leaf in leaves(self.action_space, ("action",))]
        num_dims = len(env.batch_size)
        if env.reward_keys != ["reward"] or env.reward_spec.shape[num_dims:] != (1,):
            rewards = space_of(env.full_reward_spec, num_dims, parts=gymnasium.spaces.Dict)
            self.info_leaves = leaves(rewards, (REWARDS,))
        self._now: Any = None
        self._sent: Arrays = ()

    def vector_env(self, seeds: Sequence[int] | None) -> "BatchedEnv":
        """Itself; TorchRL derives all environments' seeds from the first."""
        self._seed = seeds[0] if seeds else 0
        return self

    def start(self) -> Arrays:
        self._env.set_seed(self._seed)
        self._now = self._env.reset()
        return self._obs(self._now)

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        if not isinstance(rows, slice) and len(rows) != self.num_envs:
            raise EnvCrashed(f"{len(rows)} of {self.num_envs} TorchRL environments cannot be stepped alone")
        self._sent = tuple([np.array(action) for action in actions])

    def recv(self) -> Step:
        for (key, spec), sent in zip(self._actions, self._sent, strict=True):
            action = torch.from_numpy(sent).to(dtype=spec.dtype, device=spec.device)
            self._now.set(key, action.reshape(spec.shape))
        try:
            stepped, self._now = self._env.step_and_maybe_reset(self._now)
        except Exception as error:  # whatever the user's own environment raises is reported as its failure
            raise EnvRaised(
                f"the environments raised {type(error).__name__}: {error}\n\n{traceback.format_exc().rstrip()}"
            ) from error
        following = stepped["next"]
        terminated, truncated = _ends(self._env, following, self.num_envs)
        ended = np.flatnonzero(terminated | truncated)
        final = tuple([leaf[ended] for leaf in self._obs(following)])
        rewards = [self._rows(following[leaf.key[1:]], leaf) for leaf in self.info_leaves]
        # Where there are several, their sum counts in the statistics of the fleet.
        reward: Array = np.zeros(self.num_envs, np.float32)
        for part in rewards or [self._rows(following["reward"], _REWARD)]:
            reward += part.reshape(self.num_envs, -1).sum(1)
        obs = self._obs(self._now)
        return Step(slice(None), obs, reward, terminated, truncated, ended, final, NO_ROWS, tuple(rewards))

    def restart(self, rows: Rows) -> Arrays:
        mask = torch.zeros(self.num_envs, dtype=torch.bool)
        mask[torch.from_numpy(np.asarray(rows))] = True
        for key in self._env.reset_keys:
            shape = self._now["done" if isinstance(key, str) else (*key[:-1], "done")].shape
            aligned = mask.reshape(*self._env.batch_size, *(1,) * (len(shape) - len(self._env.batch_size)))
            self._now.set(key, aligned.expand(shape).clone())
        self._now = self._env.reset(self._now)
        return tuple([leaf[rows] for leaf in self._obs(self._now)])

    def close(self) -> None:
        if not self._env.is_closed:
            self._env.close()

    def _obs(self, tensordict: Any) -> Arrays:
        return tuple([self._rows(tensordict[leaf.key], leaf) for leaf in self._observation])

    def _rows(self, values: Any, leaf: Leaf) -> Array:
        rows: Array = values.detach().cpu().numpy()
        return rows.astype(leaf.dtype, copy=False).reshape(self.num_envs, *leaf.shape)


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
        case MultiCategorical():
            nvec = spec.nvec[index].reshape(shape).numpy()
            return gymnasium.spaces.MultiDiscrete(nvec, dtype=_numpy_type(spec.dtype))
        case Categorical() | Unbounded() if spec.dtype is torch.bool:
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
        case Unbounded():
            info = torch.iinfo(spec.dtype)
            low, high = max(info.min, -_WIDEST), min(info.max, _WIDEST)
            return gymnasium.spaces.Box(low, high, tuple(spec.shape[num_dims:]), _numpy_type(spec.dtype))
    raise EnvBuildError(
        f"a spec of type {type(spec).__name__} and shape {shape} cannot be collected; transform it into numbers, or "
        "leave it out (torchrl.envs.ExcludeTransform)"
    )


def _numpy_type(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype.type


# -- the other way: specs of MultiThreadedEnv ------------------------------------------------------------------


def set_specs(env: Any) -> None:
    """Give an EnvBase the specs of its `Pool`."""
    pool = env.pool
    shape, device = torch.Size([pool.num_envs]), pool.named_device
    nested: dict[str, Any] = {}
    for leaf, space in zip(pool.observation, pool.observation_spaces, strict=True):
        put_nested(nested, leaf.key, _spec_of(space, shape, device=device))
    env.observation_spec = _composite(nested, shape, device)
    env.action_spec = _spec_of(pool.action_space, shape, device=device)
    env.reward_spec = Unbounded(shape=(*shape, 1), device=device)
    flags = {name: Categorical(2, shape=(*shape, 1), dtype=torch.bool, device=device) for name in FLAGS}
    env.done_spec = Composite(flags, shape=shape, device=device)


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
