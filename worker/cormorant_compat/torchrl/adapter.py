"""TorchRL's environments as our collectors step them. Imported only where there is one.

# N environments
"""

import traceback
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from cormorant_compat.torchrl.specs import space_of
from cormorant_worker.envs.protocol import NO_ROWS, Rows, Step, VectorEnv
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvRaised
from cormorant_worker.spaces import Array, Arrays, Space, flatten, leaves

_OBSERVATION = "observation"


def adapt_torchrl(env: Any) -> Any:
    """A gymnasium.Env where the environment has no batch size, else several environments with a `vector_env`."""
    for kind, keys, known in (
        ("action", env.action_keys, {"action"}),
        ("reward", env.reward_keys, {"reward"}),
        ("done", env.done_keys, {"done", "terminated", "truncated"}),
    ):
        if not set(keys) <= known:
            raise EnvBuildError(
                f"the {kind} keys of {env} are {list(keys)}; collectors know {', '.join(sorted(known))}: rename them "
                "(torchrl.envs.RenameTransform)"
            )
    return BatchedEnv(env) if env.batch_size else SingleEnv(env)


def _spaces(env: Any) -> tuple[Space, Space]:
    num_dims = len(env.batch_size)
    observation = space_of(env.observation_spec, num_dims)
    assert isinstance(observation, gymnasium.spaces.Dict)
    if list(observation.spaces) == [_OBSERVATION]:
        observation = observation.spaces[_OBSERVATION]
    return observation, space_of(env.action_spec, num_dims)


def _read(space: Space, tensordict: Any) -> Any:
    """An observation as nested numpy arrays."""
    return _read_part(space, tensordict if isinstance(space, gymnasium.spaces.Dict) else tensordict[_OBSERVATION])


def _read_part(space: Space, value: Any) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _read_part(part, value[name]) for name, part in space.spaces.items()}
    return value.detach().cpu().numpy()


def _ends(following: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # Some environments have one of the two flags, or `done` alone.
    done = following["done"].bool()
    truncated, terminated = (
        None if (flag := following.get(name, None)) is None else flag.bool() for name in ("truncated", "terminated")
    )
    if truncated is None:
        truncated = torch.zeros_like(done) if terminated is None else done & ~terminated
    return (done & ~truncated if terminated is None else terminated), truncated


class SingleEnv(gymnasium.Env[Any, Any]):
    """A TorchRL environment without batch size, as gymnasium's."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.observation_space, self.action_space = _spaces(env)
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
        return _read(self.observation_space, self._now), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        spec = self._env.action_spec
        given = torch.as_tensor(np.asarray(action)).to(dtype=spec.dtype, device=spec.device).reshape(spec.shape)
        # What steps carry beside observations (counters, states) stays in the TensorDict.
        stepped, self._now = self._env.step_and_maybe_reset(self._now.set("action", given))
        following = stepped["next"]
        terminated, truncated = _ends(following)
        self._has_begun = bool((terminated | truncated).any())
        reward = float(following["reward"].item())
        return _read(self.observation_space, following), reward, bool(terminated.any()), bool(truncated.any()), {}

    def close(self) -> None:
        self._env.close(raise_if_closed=False)


class BatchedEnv(VectorEnv):
    """A TorchRL environment with a batch size: several environments that are stepped in lockstep."""

    why_not_saved = "TorchRL's environments have no get_state and set_state"

    def __init__(self, env: Any) -> None:
        self._env = env
        self._seed = 0
        self.num_envs = env.batch_size.numel()
        self.num_workers = self.num_envs
        self.observation_space, self.action_space = _spaces(env)
        self._observation = leaves(self.observation_space, ())
        self._now: Any = None
        self._action: Array = np.empty(0)

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
        (self._action,) = actions

    def recv(self) -> Step:
        spec = self._env.action_spec
        action = torch.from_numpy(np.array(self._action)).to(dtype=spec.dtype, device=spec.device).reshape(spec.shape)
        try:
            stepped, self._now = self._env.step_and_maybe_reset(self._now.set("action", action))
        except Exception as error:  # whatever the user's own environment raises is reported as its failure
            raise EnvRaised(
                f"the environments raised {type(error).__name__}: {error}\n\n{traceback.format_exc().rstrip()}"
            ) from error
        following = stepped["next"]
        terminated, truncated = (self._flat(flag, np.bool_) for flag in _ends(following))
        ended = np.flatnonzero(terminated | truncated)
        final = tuple([leaf[ended] for leaf in self._obs(following)])
        reward = self._flat(following["reward"], np.float32)
        return Step(slice(None), self._obs(self._now), reward, terminated, truncated, ended, final, NO_ROWS)

    def restart(self, rows: Rows) -> Arrays:
        mask = torch.zeros(self.num_envs, dtype=torch.bool)
        mask[torch.from_numpy(np.asarray(rows))] = True
        shape = self._now["done"].shape
        self._now = self._env.reset(self._now.set("_reset", mask.reshape(shape)))
        return tuple([leaf[rows] for leaf in self._obs(self._now)])

    def close(self) -> None:
        if not self._env.is_closed:
            self._env.close()

    def _obs(self, tensordict: Any) -> Arrays:
        parts = flatten(self.observation_space, _read(self.observation_space, tensordict))
        return tuple(
            [part.reshape(self.num_envs, *leaf.shape) for part, leaf in zip(parts, self._observation, strict=True)]
        )

    def _flat(self, values: torch.Tensor, dtype: Any) -> Array:
        flat: Array = values.detach().cpu().numpy().reshape(self.num_envs).astype(dtype)
        return flat
