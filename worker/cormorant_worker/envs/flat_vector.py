"""A gymnasium vector environment whose observations, actions and infos are flat arrays: the base of `vector.py`.
Checks everything that the environment returns.

# N environments, k of them ended
"""

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from cormorant_worker.action_mask import ACTION_MASK, info_mask_length
from cormorant_worker.envs.env_row import BadObservation, NanCheck
from cormorant_worker.envs.gymnasium_env import construct
from cormorant_worker.envs.info import InfoField, completed, find_info
from cormorant_worker.envs.protocol import EVERY_ROW, Rows, VectorEnv, WholeStep
from cormorant_worker.errors import EnvBuildError, EnvCrashed
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays, cast_exactly, flatten, leaves, map_arrays, unflattener

STEP_LIMIT_S = 60.0
"""Limit of one step of gymnasium's AsyncVectorEnv; other steps are limited by the environment or the fleet."""
_TRIES = 100
"""Resets of all rows, each with a step in which none may end, before environments with pending resets are refused."""
_NO_FINAL = 'gives no info["final_obs"]'
_OVERWRITTEN = "returns final_obs in the memory of the observations, which the reset has overwritten"
_NEEDED = ("num_envs", "single_observation_space", "single_action_space", "reset", "step")


class VectorSource(NamedTuple):
    """Builds a gymnasium vector environment of any number of rows."""

    name: str
    make: Callable[..., Any]
    """A function of `num_envs`."""

    def build(self, num_envs: int) -> Any:
        """Construct it. Raises UnknownEnv or EnvBuildError where that fails, or it has another number of rows."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of older versions of an id
            env = construct(lambda: self.make(num_envs=num_envs), f"the vector environment {self.name}")
        if missing := [name for name in _NEEDED if not hasattr(env, name)]:
            raise EnvBuildError(
                f"{self.name} returned a {type(env).__module__}.{type(env).__name__}, which has no "
                f"{', '.join(missing)}; return a gymnasium.vector.VectorEnv, or use env.gymnasium for single "
                "environments"
            )
        if env.num_envs != num_envs:
            env.close()
            raise EnvBuildError(
                f"{self.name} was called with num_envs={num_envs} and has {env.num_envs} environments; pass num_envs on"
            )
        return env


class Stepped(NamedTuple):
    """Result of one step of all N environments."""

    obs: Arrays
    """[N, ...] per leaf; the environment's own memory."""
    reward: Array
    """[N] float32."""
    terminated: Array
    """[N] bool."""
    truncated: Array
    """[N] bool."""
    info: Mapping[str, Any]

    @property
    def ended(self) -> Rows:
        return np.flatnonzero(self.terminated | self.truncated)


class FlatVector(VectorEnv):
    """`num_envs` rows of a vector environment that was just built, and how to reset and step them."""

    fields: tuple[InfoField, ...]
    """Complete: what comes with every step."""

    def __init__(self, source: VectorSource, num_envs: int) -> None:
        self.name, self.num_envs = source.name, num_envs
        self.env = source.build(num_envs)
        self.observation_space, self.action_space = self.env.single_observation_space, self.env.single_action_space
        self.steps = 0
        """Steps since it was built."""
        self._has_ended = self._has_failed = False
        self.place: Any = None
        """Device of the environment's tensors; None: it returns numpy arrays."""
        try:
            self.leaves = leaves(self.observation_space, ("observation",))
            leaves(self.action_space, ("action",))
        except EnvBuildError:
            self.close()
            raise
        self._nested_actions = unflattener(self.action_space)
        self._random = RandomActor(self.action_space, 0, observation=self.observation_space)
        self._shown: Sequence[Any] = ()
        """[N, ...] per leaf: what every row acts on next; tensors where the last step was one of those."""
        self.nan = NanCheck(self.observation_space)
        length = info_mask_length(self.observation_space, self.action_space)
        self.illegal = np.zeros((num_envs, length), np.bool_) if length else None

    def random_actions(self) -> Arrays:
        """[N, ...] per leaf of the action: any that the rows' masks allow now."""
        self._random.illegal = self.illegal
        return self._random.act(self._on_host(tuple(self._shown)), (), np.zeros(self.num_envs, np.bool_)).actions

    def begin(self, seeds: Sequence[int] | None = None, options: dict[str, Any] | None = None) -> Stepped:
        """Begin an episode in every row, under its seed where there are some: in the first form that the environment
        accepts, of a list, an array, and the first one for all.
        """
        forms: tuple[Any, ...] = (None,) if seeds is None else (list(seeds), np.asarray(seeds), seeds[0])
        first: Exception | None = None
        for seed in forms:
            try:
                obs, info = self._on_host(self.env.reset(seed=seed, options=options))
            except Exception as error:  # noqa: BLE001 - those after the first may say only that it broke something
                first = first or error
            else:
                return self._begun(obs, info, EVERY_ROW)
        assert first is not None
        raise self._failed("a reset", first) from first

    def reset(self, rows: Rows) -> Arrays:
        """Begin new episodes in `rows` alone. Returns [k, ...] first observations."""
        if len(rows) == self.num_envs:
            return tuple([leaf[rows] for leaf in self.begin().obs])
        mask = np.zeros(self.num_envs, dtype=np.bool_)
        mask[rows] = True
        try:
            obs, info = self.reset_some(mask)
        except Exception as error:
            raise self._failed("a reset of some rows", error) from error
        return tuple([leaf[rows] for leaf in self._begun(obs, info, rows).obs])

    def reset_some(self, mask: Array) -> Any:
        """Observations and info of a reset of the rows where `mask` [N] is true, or whatever the environment raises."""
        return self._on_host(self.env.reset(options={"reset_mask": self._to_device(mask)}))

    def _on_host(self, values: Any) -> Any:
        def to_host(array: Any) -> Any:
            if not hasattr(array, "detach"):
                return array
            self.place = array.device
            return array.detach().cpu().numpy()  # one on the CPU is not copied

        return map_arrays(to_host, values)

    def _to_device(self, arrays: Any) -> Any:
        if self.place is None:
            return arrays
        import torch  # the environment has imported it

        return map_arrays(partial(torch.as_tensor, device=self.place), arrays)

    def step(self, actions: Arrays) -> Stepped:
        """Step all. Raises EnvCrashed where it raised, BadObservation where the result does not fit or is NaN."""
        try:
            nested = self._to_device(self._nested_actions(actions))
            if type(self.env) is AsyncVectorEnv:
                # Its own step waits without end for a process that died.
                self.env.step_async(nested)
                stepped = self.env.step_wait(timeout=STEP_LIMIT_S)
            else:
                stepped = self.env.step(nested)
            obs, reward, terminated, truncated, info = stepped if self.place is None else self._on_host(stepped)
        except Exception as error:
            raise self._failed(f"step {self.steps + 1}", error) from error
        self.steps += 1
        rewards = self._column("reward", reward, np.float32)
        flags = self._column("terminated", terminated, np.bool_), self._column("truncated", truncated, np.bool_)
        if np.isnan(rewards).any():
            row = int(np.flatnonzero(np.isnan(rewards))[0])
            raise BadObservation(f"environment {row} returned a NaN reward in step {self.steps}", row=row)
        if not isinstance(info, Mapping):
            raise self._misfit(f"{type(info).__name__} as info; return a dict")
        self._shown = parts = self.arrays(obs)
        found = Stepped(parts, rewards, *flags, info)
        self._note_masks(info, EVERY_ROW)
        self._has_ended = bool(len(found.ended))
        return found

    def step_tensors(self, actions: Sequence[Any]) -> WholeStep:
        """For SAME_STEP. Raises as `step`, and where rows ended without `final_obs`."""
        try:
            obs, reward, terminated, truncated, info = self.env.step(self._nested_actions(actions))
        except Exception as error:
            raise self._failed(f"step {self.steps + 1}", error) from error
        self.steps += 1
        columns = tuple(map(self._to_device, (reward, terminated, truncated)))
        if any(tuple(column.shape) != (self.num_envs,) for column in columns):
            raise self._misfit(f"reward and flags of shapes {[tuple(column.shape) for column in columns]}")
        columns = columns[0], columns[1].bool(), columns[2].bool()
        parts, final, ended = self._tensors(obs), info.get("final_obs"), columns[1] | columns[2]
        self._shown = parts
        seen = parts
        if final is None:
            if ended.any():
                raise self.lost_final(_NO_FINAL)
        else:
            seen = self._tensors(final)
            if any(a.data_ptr() == b.data_ptr() for a, b in zip(seen, parts, strict=True)) and ended.any():
                raise self.lost_final(_OVERWRITTEN)
        if ACTION_MASK in info:  # for the host, where random actions are drawn
            self._note_masks(self._on_host(info), EVERY_ROW)
        return WholeStep(parts, seen, *columns, [self._info_tensor(field, info, ended) for field in self.fields])

    def _info_tensor(self, field: InfoField, info: Mapping[str, Any], ended: Any) -> Any:
        """Like `infos`, but made on the device: an upload in every step would wait for it."""
        import torch  # the environment has imported it

        leaf = field.leaf
        shape, dtype = (self.num_envs, *leaf.shape), getattr(torch, leaf.dtype.name)
        column = ended.new_full(shape, field.filling.item(), dtype=dtype)
        for source, rows in ((info, ~ended), (info.get("final_info"), ended)):
            value, mask = find_info(source, field.key) if isinstance(source, Mapping) else (None, None)
            if value is None:
                continue
            if str(getattr(value, "dtype", "")) != f"torch.{leaf.dtype.name}" or value.shape != column.shape:
                value, mask = self._to_device(self._values(field, self._on_host(source))), None
            has_value = rows if mask is None else rows & self._to_device(mask).bool()
            column = value.where(has_value.reshape(-1, *[1] * len(leaf.shape)), column)
        return column

    def _tensors(self, obs: Any) -> Sequence[Any]:
        """[N, ...] per leaf, in its dtype, on the environment's device."""
        parts: tuple[Any, ...] = flatten(self.observation_space, obs, lambda space, value: value)
        for leaf, part in zip(self.leaves, parts, strict=True):
            if tuple(part.shape) != (self.num_envs, *leaf.shape) or str(part.dtype) != f"torch.{leaf.dtype.name}":
                # Cast without a loss, or refused.
                cast: Sequence[Any] = self._to_device(self.arrays(self._on_host(obs)))
                return cast
        return parts

    def settle(self) -> None:
        """Take the resets that NEXT_STEP left pending: in AsyncVectorEnv without shared memory they outlive a reset.
        Raises EnvBuildError where some row's episode always ends in its first step, which leaves the next one pending.
        """
        for _ in range(_TRIES):
            if not self._has_ended:
                break
            self.begin()
            self.step(self.random_actions())
        else:
            raise EnvBuildError(
                f"{self.name} resets ended rows in the next step (NEXT_STEP), also after a reset of all rows, and "
                "episodes end in their first steps: no step can be told from a reset; make it with autoreset_mode "
                "SAME_STEP (gymnasium's AsyncVectorEnv: or with shared_memory=True)"
            )

    def arrays(self, obs: Any) -> Arrays:
        """[N, ...] per leaf."""
        try:
            parts = flatten(self.observation_space, obs)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            raise self._misfit(
                f"observations that do not fit {self.observation_space}: {type(error).__name__}: {error}"
            ) from error
        for leaf, part in zip(self.leaves, parts, strict=True):
            if part.shape != (self.num_envs, *leaf.shape):
                raise self._misfit(
                    f"{'.'.join(leaf.key)} of shape {part.shape}; {self.num_envs} environments and their space say "
                    f"{(self.num_envs, *leaf.shape)}"
                )
        self.nan.look(parts, EVERY_ROW)
        return parts

    def final(self, stepped: Stepped) -> Arrays:
        """[k, ...] per leaf: `final_obs` of the rows that ended, without `_final_obs`, which ALE lacks."""
        final_obs, ended = stepped.info.get("final_obs"), stepped.ended
        is_of_rows = isinstance(final_obs, np.ndarray) and final_obs.dtype == object
        if final_obs is None or (is_of_rows and any(final_obs[row] is None for row in ended)):
            raise self.lost_final(_NO_FINAL)
        if is_of_rows:
            rows = [flatten(self.observation_space, final_obs[row]) for row in ended]
            final = tuple(np.stack(parts) for parts in zip(*rows, strict=True))
        else:
            parts = self.arrays(final_obs)
            if any(np.shares_memory(a, b) for a, b in zip(parts, stepped.obs, strict=True)):
                raise self.lost_final(_OVERWRITTEN)
            final = tuple(part[ended] for part in parts)
        self.nan.look(final, ended)
        return final

    def lost_final(self, what: str) -> BadObservation:
        return BadObservation(
            f"{self.name} resets in the step that ends an episode (SAME_STEP) and {what}: the final observation is "
            "lost; return a copy (in Isaac Lab: compute_final_obs=True), or make it with autoreset_mode NEXT_STEP",
            has_stepped=False,
        )

    def infos(self, stepped: Stepped, *, is_same_step: bool) -> Arrays:
        """[N, ...] per leaf. A row that ended and was reset in the same step has its values in `final_info`."""
        columns = []
        for field in self.fields:
            values = self._values(field, stepped.info)
            if is_same_step and len(ended := stepped.ended):
                last = stepped.info.get("final_info")
                values[ended] = self._values(field, last if isinstance(last, Mapping) else {})[ended]
            columns.append(values)
        return tuple(columns)

    def complete(self, fields: Sequence[InfoField]) -> tuple[InfoField, ...]:
        """Find dtypes and shapes that are not declared, in the infos of a reset and a step. Seed it afterwards."""
        if all(field.is_complete for field in fields):
            return tuple(fields)
        infos = [self.begin(range(self.num_envs)).info, self.step(self.random_actions()).info]
        infos += [info["final_info"] for info in infos if isinstance(info.get("final_info"), Mapping)]

        def find(key: str) -> Array | None:
            value = next((v for info in reversed(infos) if (v := find_info(info, key)[0]) is not None), None)
            if value is None:
                return None
            if np.shape(value)[:1] != (self.num_envs,):
                raise self._misfit(f"{key} in info of shape {np.shape(value)} for {self.num_envs} environments")
            found: Array = np.asarray(value)[0]
            return found

        known = {key for info in infos for key in info if not key.startswith("_")}
        return completed(fields, self.name, find, known=known)

    def close(self) -> None:
        """Close the environment, ignoring what it raises."""
        with suppress(Exception):  # it may have crashed before
            self.env.close(**({"terminate": True} if self._has_failed and type(self.env) is AsyncVectorEnv else {}))

    def _values(self, field: InfoField, info: Mapping[str, Any]) -> Array:
        """[N, ...] the field of all rows, which has its fill where a row has none."""
        values = np.full((self.num_envs, *field.leaf.shape), field.filling)
        value, mask = find_info(info, field.key)
        if value is None:
            return values
        rows = np.flatnonzero(mask) if mask is not None else np.arange(self.num_envs)
        try:
            values[rows] = cast_exactly(np.asarray(value)[rows], values.dtype)
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise self._misfit(
                f"{field.key} in info that does not fit {field.dtype}{list(field.leaf.shape)}: {error}; declare "
                "another dtype or shape"
            ) from error
        return values

    def _column(self, what: str, values: Any, dtype: Any) -> Array:
        """[N] a copy: a reset of some rows may write into the environment's own memory."""
        try:
            array = np.array(values, dtype=dtype)
        except (TypeError, ValueError) as error:
            raise self._misfit(f"{what} that is not an array of numbers: {error}") from error
        if array.shape != (self.num_envs,):
            raise self._misfit(f"{what} of shape {array.shape} for {self.num_envs} environments")
        return array

    def _misfit(self, what: str) -> BadObservation:
        return BadObservation(f"{self.name} returned in step {self.steps} {what}", has_stepped=self.steps > 1)

    def _begun(self, obs: Any, info: Mapping[str, Any], rows: slice | Rows) -> Stepped:
        parts, nothing = self.arrays(obs), np.zeros(self.num_envs, dtype=np.bool_)
        self._shown = parts
        self._note_masks(info, rows)
        if isinstance(env := getattr(self.env, "unwrapped", self.env), SyncVectorEnv):
            env._autoreset_envs[rows] = False  # a derived class whose own reset leaves them would reset them again
        return Stepped(parts, np.zeros(self.num_envs, np.float32), nothing, nothing, info)

    def _note_masks(self, info: Mapping[str, Any], rows: slice | Rows) -> None:
        if self.illegal is None:
            return
        illegal = np.zeros_like(self.illegal)
        value, mask = find_info(info, ACTION_MASK)
        if isinstance(value, np.ndarray) and value.shape == illegal.shape:
            illegal = (value == 0) & (True if mask is None else mask[:, None])
        self.illegal[rows] = illegal[rows]

    def _failed(self, what: str, error: Exception) -> EnvCrashed:
        details, self._has_failed = "".join(traceback.format_exception(error)), True
        return EnvCrashed(
            f"the vector environment {self.name} raised {type(error).__name__} in {what}: {error}; fix the environment",
            has_stepped=self.steps > 0,
            details=details,
        )
