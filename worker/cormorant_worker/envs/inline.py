"""Gymnasium environments stepped one after another in this process: for debugging, and for very cheap environments."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import structlog

from cormorant_worker.envs.env_row import Crash, EnvArrays, EnvRow, Saved
from cormorant_worker.envs.info import complete_fields
from cormorant_worker.envs.protocol import Rows
from cormorant_worker.envs.single_envs import SingleEnvs

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
                self._running[row].reset(seed=self._restarts.seed(row) if is_seeded else None)
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
