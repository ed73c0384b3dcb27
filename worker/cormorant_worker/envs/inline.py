"""Gymnasium environments stepped one after another in this process: for debugging, and for very cheap environments."""

import time
import traceback
from collections.abc import Sequence

import numpy as np
import structlog

from cormorant_worker.envs.env_row import BadObservation, EnvRow, NanCheck, StepArrays, take_actions, take_illegal
from cormorant_worker.envs.gymnasium_env import Env, EnvSource
from cormorant_worker.envs.info import InfoField, complete_fields
from cormorant_worker.envs.protocol import EVERY_ROW, Rows, Step
from cormorant_worker.envs.restarts import Crash, RestartLimits, Restarts
from cormorant_worker.envs.saved import pack, save_env, unpack
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.spaces import Arrays

log = structlog.get_logger(__name__)


class InlineVectorEnv:
    """num_envs gymnasium environments in this thread; implements VectorEnv, in lockstep.

    An environment that raises is rebuilt alone, and its row comes back fresh. One that never returns, or that
    takes the process down, cannot be helped here: use SubprocessVectorEnv.

    Args:
        factory: builds each environment.
        seeds: one an environment; environment i is first reset with `seeds[i]`, later without a seed.
        limits: how many restarts are too many.
        info: which values of `info` come with every step.

    Raises:
        UnknownEnv, EnvBuildError: the first environment could not be built.
    """

    lockstep = True
    min_in_flight = 1

    def __init__(
        self,
        factory: EnvSource,
        *,
        seeds: Sequence[int],
        limits: RestartLimits = RestartLimits(),  # noqa: B008 - frozen
        info: Sequence[InfoField] = (),
    ) -> None:
        num_envs = self.num_envs = len(seeds)
        self.restarts = 0
        self._factory = factory
        self._restarts = Restarts(seeds, limits)
        first = factory.build(0)
        self.observation_space = first.observation_space
        self.action_space = first.action_space
        self._nan = NanCheck(self.observation_space)
        self._actions = take_actions(self.action_space, num_envs, np.zeros)
        self.illegal = take_illegal(self.observation_space, self.action_space, num_envs, np.zeros)
        self._info = complete_fields(info, first, factory.name)
        self.info_leaves = tuple(field.leaf for field in self._info)
        self._arrays = StepArrays.take(self.observation_space, num_envs, np.zeros, self._info)
        self._envs = [self._row(first if row == 0 else factory.build(row), row) for row in range(num_envs)]
        self._numbers = np.arange(num_envs)
        self._under_way: slice | Rows | None = None
        self._closed = False

    def start(self) -> Arrays:
        for row, env in enumerate(self._envs):
            try:
                env.reset(seed=self._restarts.seed(row))
            except BadObservation:
                raise
            except (Exception, SystemExit) as error:
                raise EnvBuildError(
                    f"environment {row} ({self._factory.name}) failed in its first reset: "
                    f"{type(error).__name__}: {error}"
                ) from error
        self._under_way = None
        self._nan.look(self._arrays.obs, EVERY_ROW)
        return tuple(obs.copy() for obs in self._arrays.obs)

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        if self._under_way is not None:
            raise RuntimeError("send was called twice without recv; these environments step in lockstep")
        for target, values in zip(self._actions, actions, strict=True):
            target[rows] = values
        self._under_way = rows

    def recv(self) -> Step:
        rows = self._under_way
        if rows is None:
            raise RuntimeError("recv was called without send")
        self._under_way = None
        replaced: list[int] = []
        for row in self._numbers[rows].tolist():
            try:
                self._envs[row].step()
            except BadObservation as error:
                error.has_stepped = self._has_stepped()
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the environment raises, it is restarted
                self._replace(row, error)
                replaced.append(row)
        return self._arrays.read(rows, self._numbers[rows], replaced, self._nan)

    def restart(self, rows: Rows) -> Arrays:
        for row in rows:
            try:
                self._envs[row].reset()
            except BadObservation:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as in recv
                self._replace(int(row), error)
        obs = tuple(obs[rows] for obs in self._arrays.obs)
        self._nan.look(obs, rows)
        return obs

    def state(self) -> bytes:
        return pack([save_env(env.env) for env in self._envs], self._restarts.state())

    def restore(self, state: bytes) -> None:
        envs, restarts = unpack(state, num_envs=self.num_envs)
        for env, part in zip(self._envs, envs, strict=True):
            env.load(part)
        self._restarts.restore(**restarts)
        self.restarts = self._restarts.count
        self._under_way = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for row in range(len(self._envs)):
            self._close_row(row)

    def _close_row(self, row: int) -> None:
        """A close that raises must not leave other environments open."""
        try:
            self._envs[row].close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the environment's edge
            log.warning(
                "env_close_failed",
                env=row,
                error=f"{type(error).__name__}: {error}",
                exception="".join(traceback.format_exception(error)),
            )

    def _has_stepped(self) -> bool:
        return self._restarts.has_stepped or any(env.steps for env in self._envs)

    def _row(self, env: Env, row: int) -> EnvRow:
        return EnvRow(env, row, actions=self._actions, sides=(self._arrays,), info=self._info, illegal=self.illegal)

    def _replace(self, row: int, error: BaseException) -> None:
        """Rebuild environment `row` until it returns a first observation or the restart limit is reached."""
        began = time.monotonic()
        cause = error
        while True:
            old = self._envs[row]
            details = "".join(traceback.format_exception(cause))
            crash = Crash(row=row, what=f"raised {type(cause).__name__}: {cause}", steps=old.steps, details=details)
            seed = self._restarts.record(crash, has_stepped=self._has_stepped())
            self.restarts = self._restarts.count
            self._close_row(row)
            try:
                self._envs[row] = self._row(self._factory.build(row), row)
                self._envs[row].reset(seed=seed)
                break
            except (Exception, SystemExit) as again:  # noqa: BLE001 - as in recv
                cause = again
        for flags in (self._arrays.terminated, self._arrays.truncated):
            flags[row] = False
        self._arrays.reward[row] = 0.0
        self._restarts.tell(crash, seconds=time.monotonic() - began)
