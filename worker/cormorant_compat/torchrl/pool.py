"""EnvPool environments that begin an episode when they are asked to: what TorchRL's users expect of `reset` and `step`.

Our environments go on by themselves: a step that ends an episode has begun the next one. Here that first observation
waits until a reset asks for it, so that nothing is stepped in between, no phantom frame is seen, and a game of several
lives continues with its next life. The environments are TorchRL's `EnvBase` where TorchRL is installed; elsewhere
`EnvBase` of this module has the same methods on TensorDicts, without specs.

# N environments
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from cormorant_compat.arguments import plain
from cormorant_compat.torchrl.plan import next_seed
from cormorant_compat.torchrl.settings import check_device
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.envs.envpool import EnvPoolTask, check_pool, envpool_module, reseed_pool, wrap_pool
from cormorant_worker.envs.protocol import EVERY_ROW, Rows, Step, VectorEnv
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.policy.action_check import ActionCheck
from cormorant_worker.policy.actor import cast_to
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays, OneHot, leaf_spaces, leaves, put_nested

if TYPE_CHECKING:
    from envpool.python.protocol import EnvPool

Build: TypeAlias = Callable[[Sequence[int] | None], VectorEnv]
"""Gives a pool with these seeds, or with those that it has."""
Policy: TypeAlias = Callable[[TensorDict], TensorDict]

_IGNORED = ("batch_size", "env_type", "gym_reset_return_info")
"""EnvPool's arguments for how a pool hands out what it has."""


class PoolOptions(TypedDict, total=False):
    """Options of `MultiThreadedEnvWrapper`, with the defaults of `Pool`."""

    categorical_action_encoding: bool
    disable_env_checker: bool | None
    frame_skip: int | None
    device: torch.device | str | None
    allow_done_after_reset: bool


class Library:
    """The attribute `lib` of TorchRL's classes: EnvPool itself, imported when it is asked for."""

    def __get__(self, instance: object, owner: type) -> Any:
        return envpool_module()


class Pool:
    """N environments of one EnvPool task. Owned by one thread."""

    def __init__(
        self,
        build: Build,
        *,
        categorical_action_encoding: bool = False,
        disable_env_checker: bool | None = None,
        frame_skip: int | None = None,
        device: torch.device | str | None = None,
        allow_done_after_reset: bool = False,
    ) -> None:
        """Build the environments, with the options of `MultiThreadedEnvWrapper`."""
        del disable_env_checker, allow_done_after_reset  # EnvPool has no checker, and is never done after a reset
        self.named_device = None if device is None else torch.device(check_device(device, "device"))
        """None where none was named: tensors lie on the CPU."""
        if frame_skip is not None and frame_skip < 1:
            raise ValueError(f"frame_skip {frame_skip} steps for an action; give 1 or more, or leave it out")
        self._build = build
        self._frame_skip = frame_skip or 1
        self._is_categorical = categorical_action_encoding
        self.device = self.named_device or torch.device("cpu")
        self._open(None)

    def _open(self, seeds: Sequence[int] | None) -> None:
        self._is_closed = False
        env = self.env = self.vector_env(seeds)
        self.num_envs = env.num_envs
        is_dict = isinstance(env.observation_space, gymnasium.spaces.Dict)
        self.observation = leaves(env.observation_space, () if is_dict else ("observation",))
        self.observation_spaces = leaf_spaces(env.observation_space)
        (self.action_space,) = leaf_spaces(env.action_space)
        self._check = ActionCheck(env.action_space)
        self._random = RandomActor(env.action_space, seed=seeds[0] if seeds else 0)
        self._obs: tuple[Array, ...] = ()
        self._waits: Array = np.zeros(self.num_envs, dtype=np.bool_)
        """[N] whose first observation has not been asked for."""

    def vector_env(self, seeds: Sequence[int] | None) -> VectorEnv:
        """The environments as collectors step them, rebuilt with a seed for each."""
        env = self._build(seeds)
        if len(leaves(env.action_space, ())) != 1:
            raise EnvBuildError(f"the actions of this task have several parts ({env.action_space}); use a fleet")
        if self._frame_skip > 1:
            env = RepeatedActions(env, self._frame_skip)
        if isinstance(env.action_space, gymnasium.spaces.Discrete) and not self._is_categorical:
            env = OneHotActions(env)
        return env

    def begin(self, asked: torch.Tensor | None) -> dict[str, Any]:
        """Begin an episode where `asked`, bool [N, ...], or everywhere. Returns all observations, nested, [N, ...], and
        flags that are not set.
        """
        if self._is_closed:
            self._open(None)
        every: Array = np.ones(self.num_envs, dtype=np.bool_)
        wanted = every if asked is None else asked.reshape(self.num_envs, -1).any(-1).cpu().numpy()
        if not self._obs:
            # EnvPool's arrays may be narrower than its spaces say.
            first = zip(self.env.start(), self.observation, strict=True)
            self._obs = tuple(values.astype(leaf.dtype) for values, leaf in first)
        else:
            rows = np.flatnonzero(wanted & ~self._waits)
            if len(rows):
                for kept, values in zip(self._obs, self.env.restart(rows), strict=True):
                    kept[rows] = values
        self._waits &= ~wanted
        return self._nest(self._obs) | self._flags(~every, ~every)

    def step(self, action: torch.Tensor) -> dict[str, Any]:
        """Step every environment. Returns observations, the true last ones where episodes ended; `reward` float32,
        `done`, `terminated` and `truncated` bool, all [N, 1]. Raises InvalidAction for NaN, or what is out of the
        space.
        """
        if not self._obs:
            self.begin(None)
        given = action.detach().cpu().numpy()
        self._check.fit((given,), self.num_envs)
        (wanted,) = self._check.leaves
        actions = (given if given.dtype == wanted.dtype else cast_to(wanted, given),)
        self._check.values(actions)
        self.env.send(actions, EVERY_ROW)
        step = self.env.recv()
        for kept, now in zip(self._obs, step.obs, strict=True):
            kept[:] = now
        reached = self._obs
        if len(step.ended):
            reached = tuple(leaf.copy() for leaf in self._obs)
            for leaf, last in zip(reached, step.final, strict=True):
                leaf[step.ended] = last
        self._waits[:] = False
        self._waits[step.ended] = True
        flags = self._flags(step.terminated, step.truncated)
        return self._nest(reached) | {"reward": self._column(step.reward)} | flags

    def draw(self) -> torch.Tensor:
        """Random actions, [N, ...]."""
        self._random.illegal = self.env.illegal
        (drawn,) = self._random.act((), (), self._waits).actions
        return torch.from_numpy(np.ascontiguousarray(drawn)).to(self.device)

    def reseed(self, seed: int) -> None:
        """Rebuild the environments, each with a seed derived from this one."""
        self.close()
        self._open(WorkerPlace(seed=seed).env_seeds(self.num_envs))

    def close(self) -> None:
        """Let go of the pool. May be called twice; `begin` builds it again."""
        self._is_closed = True
        self.env.close()

    def _nest(self, obs: Sequence[Array]) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for leaf, values in zip(self.observation, obs, strict=True):
            put_nested(nested, leaf.key, torch.from_numpy(values.copy()).to(self.device))
        return nested

    def _flags(self, terminated: Array, truncated: Array) -> dict[str, torch.Tensor]:
        flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
        return {name: self._column(flag) for name, flag in flags.items()}

    def _column(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values.copy()).unsqueeze(-1).to(self.device)


class StandIn:
    """Methods of TorchRL's `EnvBase` that scripts call, over the `_reset`, `_step` and `_set_seed` of a subclass."""

    pool: Pool

    def __init__(self, *, device: torch.device | None, batch_size: torch.Size) -> None:
        self.device, self.batch_size = device, batch_size

    _reset: Callable[..., TensorDict]
    _step: Callable[[TensorDictBase], TensorDict]
    _set_seed: Callable[[int], None]

    def reset(self, tensordict: TensorDict | None = None) -> TensorDict:
        """Begin new episodes in all environments, or in those that `_reset` marks."""
        return self._reset(tensordict)

    def step(self, tensordict: TensorDict) -> TensorDict:
        """Step with `tensordict["action"]`, and write the result under "next"."""
        return tensordict.set("next", self._step(tensordict))

    def rand_step(self, tensordict: TensorDict | None = None) -> TensorDict:
        """Step with random actions from the current states; where an episode ended, the next one begins."""
        if tensordict is None:
            tensordict = self._reset(TensorDict({"_reset": torch.zeros(self.batch_size, dtype=torch.bool)}))
        return self.step(tensordict.set("action", self.pool.draw()))

    def rollout(self, max_steps: int, policy: Policy | None = None, *, break_when_any_done: bool = True) -> TensorDict:
        """Reset, then play: TensorDict [N, T] with T <= `max_steps`. `policy` writes "action" into the TensorDict it
        gets; None: random actions.
        """
        rows: list[TensorDict] = []
        current = self.reset()
        for _ in range(max_steps):
            rows.append(self.rand_step(current) if policy is None else self.step(policy(current)))
            done = rows[-1]["next", "done"]
            if break_when_any_done and bool(done.any()):
                break
            current = self._reset(TensorDict({"_reset": done}))
        stacked: TensorDict = torch.stack(rows, dim=1)
        stacked.names = [None, "time"]
        return stacked

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Rebuild the environments, each with a seed derived from this one. Returns the next seed."""
        self._set_seed(seed)
        return seed if static_seed else next_seed(seed, 1)


HAS_TORCHRL = find_spec("torchrl") is not None
if TYPE_CHECKING or not HAS_TORCHRL:
    EnvBase = StandIn
else:
    from torchrl.envs import EnvBase


class MultiThreadedEnvWrapper(EnvBase):
    """A pool that `envpool.make` built, of any `env_type`, as a TorchRL environment of batch size [num_envs].

    Do not step the pool elsewhere any more. `disable_env_checker` and `allow_done_after_reset` mean nothing: EnvPool
    has no checker, and is never done after a reset.

    Raises:
        EnvBuildError: it is not a pool, or steps only part of its environments at a time.
        ValueError: a frame_skip below 1, or a device that does not exist.
    """

    lib = Library()

    def __init__(self, env: "EnvPool", **options: Unpack[PoolOptions]) -> None:
        check_pool(env)
        self._begin(lambda seeds: wrap_pool(env if seeds is None else reseed_pool(env, seeds)), options)

    def _begin(self, build: Build, options: PoolOptions) -> None:
        pool = Pool(build, **options)
        super().__init__(device=pool.named_device, batch_size=torch.Size([pool.num_envs]))
        self.pool = pool
        self.num_workers = pool.num_envs
        if HAS_TORCHRL:
            from cormorant_compat.torchrl.adapter import set_specs

            set_specs(self)

    def vector_env(self, seeds: Sequence[int] | None) -> VectorEnv:
        """The environments in the form that Cormorant's collectors step."""
        return self.pool.vector_env(seeds)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDict:
        self.is_closed = False  # a pool that was closed is built again
        begun = self.pool.begin(None if tensordict is None else tensordict.get("_reset", None))
        return TensorDict(begun, batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return TensorDict(self.pool.step(tensordict["action"]), batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.pool.reseed(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Release the pool. May be called twice."""
        del raise_if_closed
        self.is_closed = True
        self.pool.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_workers={self.num_workers}, device={self.device})"


class MultiThreadedEnv(MultiThreadedEnvWrapper):
    """An EnvPool task as a TorchRL environment.

        env = MultiThreadedEnv(num_workers=3, env_name="Pendulum-v1")
        env.rollout(5)
        env.close()

    "ALE/" before EnvPool's name of the task is dropped. `create_env_kwargs` are EnvPool's own arguments, with `seed`,
    `num_threads` and `max_episode_steps`; the options are those of the wrapper.

    Raises:
        UnknownEnv: EnvPool has no such task; with near matches.
        EnvBuildError: an argument is not known or does not fit; before anything is built.
        ValueError: a frame_skip below 1, or a device that does not exist.
    """

    def __init__(
        self,
        num_workers: int,
        env_name: str,
        *,
        create_env_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[PoolOptions],
    ) -> None:
        if num_workers < 1:
            raise EnvBuildError(f"num_workers {num_workers}; give 1 or more environments")
        given = {name: value for name, value in (create_env_kwargs or {}).items() if name not in _IGNORED}
        threads = given.pop("num_threads", 0) or min(num_workers, available_cpus())
        # A number, from which each environment's own seed follows, or a list with one for each.
        seed = plain(given.pop("seed", 0))
        own = WorkerPlace(seed=seed).env_seeds(num_workers) if isinstance(seed, int) else [int(s) for s in seed]
        if len(own) != num_workers:
            raise EnvBuildError(
                f"create_env_kwargs.seed has {len(own)} seeds for num_workers {num_workers}; give as many"
            )
        name, most = env_name.replace("ALE/", ""), given.pop("max_episode_steps", 0) or 0
        task = EnvPoolTask(task_id=name, max_episode_steps=most, kwargs=given)
        task.check()
        self._begin(lambda seeds: task.open(num_threads=threads, seeds=own if seeds is None else seeds), options)
        self.env_name = name
        """EnvPool's name of the task."""
        self.create_env_kwargs = dict(create_env_kwargs or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env={self.env_name}, num_workers={self.num_workers}, device={self.device})"


# -- actions as TorchRL has them: one-hot vectors, and one for several steps


class _Forwarding(VectorEnv):
    """Forwards to a pool in lockstep, which has neither infos nor states nor restarts."""

    def __init__(self, env: VectorEnv) -> None:
        self._env = env
        self.num_envs, self.why_not_saved = env.num_envs, env.why_not_saved
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def start(self) -> Arrays:
        return self._env.start()

    def recv(self) -> Step:
        return self._env.recv()

    def restart(self, rows: Rows) -> Arrays:
        return self._env.restart(rows)

    def close(self) -> None:
        self._env.close()


class OneHotActions(_Forwarding):
    """Environments with one Discrete action, which is sent to them as a one-hot vector."""

    def __init__(self, env: VectorEnv) -> None:
        discrete: Any = env.action_space
        assert isinstance(discrete, gymnasium.spaces.Discrete), discrete
        super().__init__(env)
        self._start = int(discrete.start)
        self._dtype = np.dtype(discrete.dtype)
        self.action_space = OneHot(int(discrete.n))

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        self._env.send(((actions[0].argmax(-1) + self._start).astype(self._dtype),), rows)


class RepeatedActions(_Forwarding):
    """Environments each of whose steps is up to `times` steps of `env` with the same action. Rewards are summed, the
    observation is the last one. An action is not carried into the next episode.
    """

    def __init__(self, env: VectorEnv, times: int) -> None:
        super().__init__(env)
        self._times = times
        self._actions: Arrays = ()
        self._rows: slice | Rows = EVERY_ROW

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        self._actions, self._rows = actions, rows
        self._env.send(actions, rows)

    def recv(self) -> Step:
        numbers = np.arange(self.num_envs)[self._rows]
        going = np.arange(len(numbers))
        obs, final = (
            tuple([np.zeros((len(numbers), *leaf.shape), leaf.dtype) for leaf in leaves(self.observation_space, ())])
            for _ in range(2)
        )
        reward: Array = np.zeros(len(numbers), np.float32)
        terminated, truncated = np.zeros((2, len(numbers)), np.bool_)
        for left in reversed(range(self._times)):
            step = self._env.recv()
            reward[going] += step.reward
            terminated[going], truncated[going] = step.terminated, step.truncated
            for kept, now in zip(obs, step.obs, strict=True):
                kept[going] = now
            for kept, last in zip(final, step.final, strict=True):
                kept[going[step.ended]] = last
            going = np.flatnonzero(~(terminated | truncated))
            if not left or not len(going):
                break
            self._env.send(tuple([leaf[going] for leaf in self._actions]), numbers[going])
        ended = np.flatnonzero(terminated | truncated)
        return Step(self._rows, obs, reward, terminated, truncated, ended, tuple([a[ended] for a in final]))
