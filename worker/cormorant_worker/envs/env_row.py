"""One gymnasium environment that reads its actions from one row of preallocated arrays, and writes its steps there.

Used by InlineVectorEnv for each of its environments, and by the child processes of SubprocessVectorEnv.

It can be saved, as values of JSON, when it has `get_state() -> Mapping` and `set_state(mapping)`, of plain data and
numpy arrays, and when each of its wrappers has them too or is one of gymnasium's whose attributes are listed here.
"""

import base64
import math
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers

from cormorant_worker.action_mask import ACTION_MASK, info_mask, info_mask_length
from cormorant_worker.envs.gymnasium_env import Env
from cormorant_worker.envs.info import InfoField, InfoMisfit, info_writer
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvError, EnvNotSaved, StateError, UnknownEnv
from cormorant_worker.spaces import Array, Arrays, Leaf, Space, flatten, leaves, unflattener


class BadObservation(EnvCrashed):
    """The environment returned NaN or something that its space or env.info does not describe: no restart would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """Why the environment of a row failed."""

    row: int
    what: str
    """End of a sentence: "raised ValueError: ...", "gave no answer within 5 s", "was killed by SIGKILL"; with a `cause`
    a whole sentence."""
    steps: int
    """Steps that it had completed since it was built; it failed in the next one, or in a reset."""
    details: str = ""
    """The traceback, if there is one."""
    cause: type[EnvError] | None = None
    """UnknownEnv, EnvBuildError or BadObservation, if it raised one of them."""
    error: BaseException | None = field(default=None, repr=False)
    """Its exception, if it steps in this process."""

    @classmethod
    def of(cls, error: BaseException, *, row: int, steps: int) -> "Crash":
        cause = next((kind for kind in (BadObservation, UnknownEnv, EnvBuildError) if isinstance(error, kind)), None)
        what = str(error) if cause else f"raised {type(error).__name__}: {error}"
        return cls(row=row, what=what, steps=steps, details="".join(traceback.format_exception(error)), cause=cause)

    def sentence(self) -> str:
        """One sentence that names the environment, the cause and the step."""
        return f"environment {self.row} {self.what} (after {self.steps} completed steps since it was built)"


EnvState = list[Any]
"""One entry per layer, from the outermost wrapper to the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """Arrays that n environments write, one row each."""

    obs: Arrays
    """[n, ...] per leaf."""
    final: Arrays
    """[n, ...] per leaf; only rows that ended are meaningful."""
    reward: Array
    """[n] float32."""
    terminated: Array
    """[n] bool."""
    truncated: Array
    """[n] bool."""
    info: Arrays
    """[n, ...] a declared key of info."""


class EnvArrays:
    """All arrays that n environments read and write: `take` gives out zeroed ones, np.zeros or pieces of shared memory.
    Equal arguments call it alike, so processes that share memory find the same ones.
    """

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        info: Sequence[InfoField],
        take: Callable[[tuple[int, ...], np.dtype[Any]], Array],
        *,
        num_sides: int,
    ) -> None:
        def of(parts: Iterable[Leaf]) -> Arrays:
            return tuple([take((num_envs, *leaf.shape), leaf.dtype) for leaf in parts])

        observation = leaves(observation_space, ("observation",))
        length = info_mask_length(observation_space, action_space)
        self.actions = of(leaves(action_space, ("action",)))
        """[n, ...] per leaf."""
        self.illegal = take((num_envs, length), np.dtype(np.bool_)) if length else None
        """`VectorEnv.illegal`."""
        self.sides = [
            StepArrays(
                obs=of(observation),
                final=of(observation),
                reward=take((num_envs,), np.dtype(np.float32)),
                terminated=take((num_envs,), np.dtype(np.bool_)),
                truncated=take((num_envs,), np.dtype(np.bool_)),
                info=of(field.leaf for field in info),
            )
            for _ in range(num_sides)
        ]
        """Each step is written into one of them."""


class NanCheck:
    """Looks for NaN in a vector of environments, with one check per leaf for all of them."""

    def __init__(self, observation_space: Space) -> None:
        parts = leaves(observation_space, ("observation",))
        self._parts = [(i, ".".join(leaf.key)) for i, leaf in enumerate(parts) if leaf.dtype.kind == "f"]

    def look(self, arrays: Arrays, rows: slice | Array) -> None:
        """Check [n, ...] per leaf. `rows`: numbers of the environments, for the message; a slice means all.
        Several steps of them may follow one another.
        """
        for i, key in self._parts:
            flat = arrays[i].reshape(-1)
            # x.x is NaN only where an x is: inf * inf is inf. One BLAS call, without a mask of x's size.
            if math.isnan(np.vdot(flat, flat)):
                position = int(np.flatnonzero(np.isnan(arrays[i]).reshape(len(arrays[i]), -1).any(axis=1))[0])
                row = position if isinstance(rows, slice) else int(rows[position % len(rows)])
                raise BadObservation(f"environment {row} returned NaN in {key}", row=row)

    def check_steps(self, obs: Arrays, reward: Array, at: tuple[Array, Array], final: Arrays) -> None:
        """Check several steps; see `VectorEnv.check_steps`."""
        self.look(tuple(leaf[1:].reshape(-1, *leaf.shape[2:]) for leaf in obs), np.arange(reward.shape[1]))
        self.look(final, at[1])
        if np.isnan(reward).any():
            row = int(np.nonzero(np.isnan(reward))[1][0])
            raise BadObservation(f"environment {row} returned a NaN reward", row=row)


class EnvRow:
    """Steps one environment on behalf of a vector of them, and closes it. `row` is its number there, for messages, and
    its row in `arrays`, from which actions are read and into which steps are written: `step` and `reset` choose a side
    by its index. `info`: keys of `info` to write, with dtypes and shapes.
    """

    def __init__(self, env: Env, row: int, arrays: EnvArrays, info: Sequence[InfoField] = ()) -> None:
        self.env = env
        self.steps = 0
        """Steps completed so far, over all episodes."""
        self.reset_kwargs: Mapping[str, Any] = {}
        """Given to the environment at every reset, beside the seed."""
        self._row = row
        actions, build = row_views(arrays.actions, row), unflattener(env.action_space)
        # A Python int, or copies: the environment may keep its action, and these rows are written again.
        self.read_action: Callable[[], Any] = (
            actions[0].item
            if isinstance(env.action_space, gymnasium.spaces.Discrete)
            else lambda: build([view.copy() for view in actions])
        )
        self._write_obs = [self._writer(side.obs) for side in arrays.sides]
        self._write_final = [self._writer(side.final) for side in arrays.sides]
        self._write_info = [info_writer(info, row_views(side.info, row)) for side in arrays.sides] if info else []
        self._illegal = None if arrays.illegal is None else arrays.illegal[row]
        self._may_be_illegal = True
        """False where no action is marked: what the row holds at first is of an earlier process or environment."""
        self._flags = [(side.reward, side.terminated, side.truncated) for side in arrays.sides]

    def reset(self, *, seed: int | None = None, side: int = 0) -> None:
        """Begin an episode and write its first observation."""
        obs, info = self.env.reset(seed=seed, **self.reset_kwargs)
        if self._illegal is not None:
            self._note_mask(info, self._illegal)
        self._write_obs[side](obs)

    def step(self, side: int = 0) -> None:
        """Step once; if that ends the episode, write the final observation and begin the next episode. Raises
        BadObservation where the reward is NaN (for observations see `NanCheck`) or a leaf does not fit, and whatever
        the environment raises.
        """
        obs, reward, terminated, truncated, info = self.env.step(self.read_action())
        if self._write_info:
            try:
                self._write_info[side](info)
            except InfoMisfit as error:
                raise self._bad("info", f" that cannot be stored: {error}") from error
        if terminated or truncated:
            self._write_final[side](obs)
            obs, info = self.env.reset(**self.reset_kwargs)
        if self._illegal is not None and (self._may_be_illegal or (isinstance(info, dict) and ACTION_MASK in info)):
            self._note_mask(info, self._illegal)
        self._write_obs[side](obs)
        if isinstance(reward, np.ndarray) and reward.size == 1:
            reward = reward.item()
        row = self._row
        rewards, terminations, truncations = self._flags[side]
        try:
            rewards[row] = reward
        except (TypeError, ValueError) as error:
            raise self._bad(f"{reward!r} as the reward", "; return one number") from error
        if reward is None or reward != reward:
            raise self._bad("no reward (None)" if reward is None else "a NaN reward")
        terminations[row], truncations[row] = terminated, truncated
        self.steps += 1

    def _note_mask(self, info: Any, illegal: Array) -> None:
        mask = info_mask(info, len(illegal))
        illegal[:] = False if mask is None else np.equal(mask, 0)
        self._may_be_illegal = mask is not None

    def _bad(self, what: str, more: str = "") -> BadObservation:
        words = f"environment {self._row} returned {what} in step {self.steps + 1} since it was built{more}"
        return BadObservation(words, row=self._row)

    def _writer(self, arrays: Arrays) -> Callable[[Any], None]:
        space = self.env.observation_space
        keys = [".".join(leaf.key) for leaf in leaves(space, ("observation",))]
        views = row_views(arrays, self._row)
        simple = len(views) == 1 and isinstance(space, gymnasium.spaces.Box)
        # Of any other dtype, `flatten` looks at the values. Numpy's own dtypes are single objects.
        dtype, is_float = views[0].dtype, views[0].dtype.kind == "f"

        def write(obs: Any) -> None:
            if (
                simple
                and type(obs) is np.ndarray
                and (obs.dtype is dtype or (is_float and obs.dtype.kind == "f"))
                and obs.shape == space.shape
            ):
                views[0][...] = obs
                return
            try:
                parts = flatten(space, obs)
            except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
                misfit = f" that does not fit its space {space}: {type(error).__name__}: {error}"
                raise self._bad("an observation", misfit) from error
            for key, view, part in zip(keys, views, parts, strict=True):
                if part.shape != view.shape:
                    raise self._bad(f"{key} of shape {part.shape}", f"; its space says {view.shape}")
                view[...] = part

        return write

    def save(self) -> EnvState | str:
        """The environment's state, or why it has none. Raises the errors of its get_state."""
        try:
            return save_env(self.env)
        except EnvNotSaved as error:
            return str(error)

    def load(self, state: EnvState) -> str:
        """Restore a state of `save`. Returns why that failed; empty: it did not."""
        self._may_be_illegal = True  # restored as well
        try:
            load_env(self.env, state)
        except Exception as error:  # noqa: BLE001 - the environment's own set_state may raise anything
            return f"{type(error).__name__}: {error}"
        return ""


def row_views(arrays: Arrays, row: int) -> list[Array]:
    """Writable views of one row, even of a leaf with shape ()."""
    return [array[row : row + 1].reshape(array.shape[1:]) for array in arrays]


_KEPT: dict[type, tuple[str, ...]] = {
    wrappers.FrameStackObservation: ("obs_queue",),
    wrappers.NormalizeObservation: ("obs_rms.mean", "obs_rms.var", "obs_rms.count"),
    wrappers.NormalizeReward: ("return_rms.mean", "return_rms.var", "return_rms.count", "discounted_reward"),
    wrappers.RecordEpisodeStatistics: (
        "episode_count",
        "episode_returns",
        "episode_lengths",
        "time_queue",
        "return_queue",
        "length_queue",
    ),
    wrappers.TimeAwareObservation: ("timesteps",),
}
"""Attributes of gymnasium's wrappers that change as they step, but for times of this process."""
_TRANSFORMS = (wrappers.TransformAction, wrappers.TransformObservation, wrappers.TransformReward)


def save_env(env: Env) -> EnvState:
    """The states of all layers of one environment."""
    states: EnvState = []
    for layer in _layers(env):
        if hasattr(layer, "get_state") and hasattr(layer, "set_state"):
            states.append(_plain(layer.get_state()))
        elif isinstance(layer, wrappers.TimeLimit):
            states.append(layer._elapsed_steps)
        elif isinstance(layer, wrappers.OrderEnforcing | wrappers.PassiveEnvChecker) or _is_stateless(layer):
            states.append(None)
        elif names := _KEPT.get(type(layer)):
            values = ((name, attrgetter(name)(layer)) for name in names)
            states.append(_plain({name: list(v) if isinstance(v, deque) else v for name, v in values}))
        else:
            raise EnvNotSaved(f"{type(layer).__name__} has no get_state and set_state")
    return states


def load_env(env: Env, states: EnvState) -> None:
    """Put `save_env`'s result into an equal environment."""
    layers = _layers(env)
    if len(layers) != len(states):
        raise StateError(f"a state of {len(states)} layers does not fit an environment of {len(layers)} layers: {env}")
    for layer, state in zip(layers, states, strict=True):
        if hasattr(layer, "set_state"):
            layer.set_state(_rich(state))
        elif isinstance(layer, wrappers.TimeLimit):
            layer._elapsed_steps = state
        elif isinstance(layer, wrappers.OrderEnforcing):
            layer._has_reset = True
        elif names := _KEPT.get(type(layer)):
            kept = _rich(state)
            for name in names:
                path, _, last = name.rpartition(".")
                owner = attrgetter(path)(layer) if path else layer
                before = getattr(owner, last)
                setattr(owner, last, deque(kept[name], before.maxlen) if isinstance(before, deque) else kept[name])
        elif not (isinstance(layer, wrappers.PassiveEnvChecker) or _is_stateless(layer)):
            raise StateError(f"{type(layer).__name__} has no set_state: the state was saved by another environment")


def _is_stateless(layer: Any) -> bool:
    """Whether it is one of gymnasium's own transformations. A user's function or subclass may keep something."""
    kind = type(layer)
    return issubclass(kind, _TRANSFORMS) and kind not in _TRANSFORMS and kind.__module__.startswith("gymnasium.")


def _layers(env: Env) -> list[Any]:
    layers: list[Any] = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {"map": [[_plain(key), _plain(item)] for key, item in value.items()]}
        case np.ndarray():
            array = np.ascontiguousarray(value).reshape(value.shape)
            return {"array": [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}
        case np.generic():
            return {"scalar": _plain(np.asarray(value))}
        case tuple():
            return {"tuple": [_plain(item) for item in value]}
        case list():
            return [_plain(item) for item in value]
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case None | bool() | int() | float() | str():
            return value
    raise StateError(
        f"get_state returned a {type(value).__name__}; plain data (numbers, text, lists, mappings) and numpy arrays "
        "can be saved"
    )


def _rich(value: Any) -> Any:
    match value:
        case {"map": items}:
            return {_rich(key): _rich(item) for key, item in items}
        case {"array": [dtype, shape, data]}:
            return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
        case {"scalar": data}:
            return _rich(data)[()]
        case {"tuple": items}:
            return tuple(_rich(item) for item in items)
        case {"bytes": data}:
            return base64.b64decode(data)
        case list():
            return [_rich(item) for item in value]
    return value
