"""Gymnasium environments stepped one after another in this process: for debugging, and for very cheap environments."""

import traceback
from collections.abc import Sequence

import numpy as np
import structlog

from cormorant_worker.envs.env_row import BadObservation, EnvArrays, EnvRow, NanCheck
from cormorant_worker.envs.gymnasium_env import EnvSource, check_same, words_of
from cormorant_worker.envs.info import InfoField, complete_fields
from cormorant_worker.envs.protocol import EVERY_ROW, Rows, Step, VectorEnv
from cormorant_worker.envs.restarts import Crash, RestartLimits, Restarts
from cormorant_worker.envs.saved import pack, save_env, unpack
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.spaces import Arrays

log = structlog.get_logger(__name__)


class InlineVectorEnv(VectorEnv):
    """num_envs gymnasium environments in this thread, in lockstep.

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

    def __init__(
        self,
        factory: EnvSource,
        *,
        seeds: Sequence[int],
        limits: RestartLimits = RestartLimits(),  # noqa: B008 - frozen
        info: Sequence[InfoField] = (),
    ) -> None:
        num_envs = self.num_envs = len(seeds)
        self._factory = factory
        self._restarts = Restarts(seeds, limits)
        envs = [factory.build(row) for row in range(num_envs)]
        check_same(
            f"the environments of {factory.name}",
            [(factory.called(row), words_of(env.observation_space, env.action_space)) for row, env in enumerate(envs)],
        )
        first = envs[0]
        self.observation_space = first.observation_space
        self.action_space = first.action_space
        self._nan = NanCheck(self.observation_space)
        self._info = complete_fields(info, first, factory.name)
        self.info_leaves = tuple(field.leaf for field in self._info)
        self._arrays = EnvArrays.take(
            self.observation_space, self.action_space, num_envs, self._info, np.zeros, num_sides=1
        )
        self.illegal = self._arrays.illegal
        self._steps = self._arrays.sides[0]
        self._envs = [EnvRow(env, row, self._arrays, self._info) for row, env in enumerate(envs)]
        self._numbers = np.arange(num_envs)
        self._under_way: slice | Rows | None = None
        self._closed = False

    @property
    def restarts(self) -> int:
        return self._restarts.count

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
        self._nan.look(self._steps.obs, EVERY_ROW)
        return tuple(obs.copy() for obs in self._steps.obs)

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        if self._under_way is not None:
            raise RuntimeError("send was called twice without recv; these environments step in lockstep")
        for target, values in zip(self._arrays.actions, actions, strict=True):
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
        return self._steps.read(rows, self._numbers[rows], replaced, self._nan)

    def restart(self, rows: Rows) -> Arrays:
        for row in rows:
            try:
                self._envs[row].reset()
            except BadObservation:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as in recv
                self._replace(int(row), error)
        obs = tuple(obs[rows] for obs in self._steps.obs)
        self._nan.look(obs, rows)
        return obs

    def state(self) -> bytes:
        return pack([save_env(env.env) for env in self._envs], self._restarts.state())

    def restore(self, state: bytes) -> None:
        envs, restarts = unpack(state, num_envs=self.num_envs)
        for env, part in zip(self._envs, envs, strict=True):
            env.load(part)
        self._restarts.restore(**restarts)
        self._under_way = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for row in range(len(self._envs)):
            self._close_row(row)

    def _close_row(self, row: int) -> None:
        try:
            self._envs[row].env.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - one that raises leaves no other one open
            log.warning(
                "env_close_failed",
                env=row,
                error=f"{type(error).__name__}: {error}",
                exception="".join(traceback.format_exception(error)),
            )

    def _has_stepped(self) -> bool:
        return self._restarts.has_stepped or any(env.steps for env in self._envs)

    def _replace(self, row: int, error: BaseException) -> None:
        """Rebuild environment `row` until it returns a first observation or the restart limit is reached."""
        cause = error
        while True:
            old = self._envs[row]
            details = "".join(traceback.format_exception(cause))
            crash = Crash(row=row, what=f"raised {type(cause).__name__}: {cause}", steps=old.steps, details=details)
            seed = self._restarts.record(crash, has_stepped=self._has_stepped())
            self._close_row(row)
            try:
                self._envs[row] = EnvRow(self._factory.build(row), row, self._arrays, self._info)
                self._envs[row].reset(seed=seed)
                break
            except (Exception, SystemExit) as again:  # noqa: BLE001 - as in recv
                cause = again
        self._steps.terminated[row] = self._steps.truncated[row] = False
        self._steps.reward[row] = 0.0
