"""Gymnasium environments stepped one after another in this process: for debugging, for very cheap environments, and for
evaluations of vector environments, each of whose episodes is played in a vector of one row, so that it depends on its
seed alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import gymnasium
import numpy as np
import structlog

from cormorant_worker.action_mask import ACTION_MASK
from cormorant_worker.envs.env_row import Crash, EnvArrays, EnvRow, Saved
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.info import complete_fields
from cormorant_worker.envs.protocol import EVERY_ROW, Rows, VectorEnv
from cormorant_worker.envs.request import EnvRequest
from cormorant_worker.envs.single_envs import SingleEnvs
from cormorant_worker.spaces import Arrays, flatten, unflattener

log = structlog.get_logger(__name__)


class InlineVectorEnv(SingleEnvs[EnvRow]):
    """Environments in this thread. One that never returns, or takes the process down, cannot be restarted."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for row, env in self._running.items():
                self._end(row, env)

    def _build(self, rows: Iterable[int]) -> None:
        for row in rows:
            try:
                env = self._factory.build(row)
                info = complete_fields(self._info, env, self._factory.name)
            except Exception as error:  # noqa: BLE001 - whatever it raises, it is built again
                self._fail(row, error)
                continue
            self._learn(row, env.observation_space, env.action_space, info)
            self._running[row] = EnvRow(env, row, self._arrays, info)

    def _lay_out(self) -> EnvArrays:
        spaces = self.observation_space, self.action_space
        return EnvArrays.take(*spaces, self.num_envs, self._info, np.zeros, num_sides=1)

    def _reset(self, rows: Iterable[int], *, is_seeded: bool = False) -> None:
        for row in rows:
            try:
                self._running[row].reset(seed=self._restarts.seeds[row] if is_seeded else None)
            except Exception as error:  # noqa: BLE001 - as in `_build`
                self._fail(row, error)

    def _step(self, rows: slice | Rows) -> None:
        running = self._running
        for row in self._numbers[rows].tolist():
            try:
                running[row].step()
            except Exception as error:  # noqa: BLE001 - as in `_build`
                self._fail(row, error)

    def _ask(self, states: Sequence[Saved] = ()) -> Mapping[int, Saved]:
        return {row: env.load(states[row]) if states else env.save() for row, env in self._running.items()}

    def _has_stepped(self) -> bool:
        return any(env.steps for env in self._running.values())

    def _fail(self, row: int, error: BaseException) -> None:
        crash = Crash.of(error, row=row, steps=self._running[row].steps if row in self._running else 0)
        self._lose(replace(crash, error=error))

    def _end(self, row: int, env: EnvRow) -> None:
        try:
            env.env.close()
        except Exception:  # one that raises leaves no other one open
            log.warning("env_close_failed", env=row, exc_info=True)


class Reseeded(VectorEnv, Protocol):
    """A VectorEnv whose next `start` uses these seeds and options."""

    seeds: Sequence[int]
    options: dict[str, Any] | None = None
    """Options of the reset."""


class OneRow(gymnasium.Env[Any, Any]):
    """The only row of a vector environment."""

    def __init__(self, vector: Reseeded) -> None:
        self._vector = vector
        self.observation_space, self.action_space = vector.observation_space, vector.action_space
        self._nested = unflattener(self.observation_space)
        self._first: Arrays | None = None
        """The first observation of an episode that has begun already."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None or options or self._first is None:
            self._vector.seeds = self._vector.seeds if seed is None else (seed,)
            self._vector.options = options
            self._first = self._vector.start()
        first, self._first = self._first, None
        return self._nested([leaf[0].copy() for leaf in first]), self._mask()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        flat = tuple([np.asarray(part)[None] for part in flatten(self.action_space, action)])
        while True:
            self._vector.send(flat, EVERY_ROW)
            step = self._vector.recv()
            if len(step.reward):  # else the row is held back until the step that resets it
                break
        if len(step.ended):
            self._first = tuple([leaf.copy() for leaf in step.obs])
        obs = self._nested([leaf[0].copy() for leaf in (step.final if len(step.ended) else step.obs)])
        info = {leaf.key[-1]: column[0] for leaf, column in zip(self._vector.info_leaves, step.info, strict=True)}
        return obs, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), self._mask() | info

    def close(self) -> None:
        self._vector.close()

    def _mask(self) -> dict[str, Any]:
        return {} if self._vector.illegal is None else {ACTION_MASK: ~self._vector.illegal[0]}


class _Rows(EnvSource):
    def __init__(self, name: str, make: Callable[[], Reseeded]) -> None:
        self._name, self._make = name, make

    @property
    def name(self) -> str:
        return self._name

    def build(self, row: int) -> OneRow:  # the same for every row
        return OneRow(self._make())


def open_rows(
    request: EnvRequest, wrap: Callable[[EnvSource], EnvSource], name: str, make: Callable[[], Reseeded]
) -> VectorEnv:
    """One environment for each episode of an evaluation, in this process. `make`: returns a vector of one row."""
    return InlineVectorEnv(wrap(_Rows(name, make)), seeds=request.seeds, limits=request.limits, info=request.info)
