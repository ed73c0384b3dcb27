"""Gymnasium environments in their own processes: parallel, and each one crashes, hangs and restarts alone."""

import contextlib
import math
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import structlog

from cormorant_worker.envs.child import CLOSE, LOAD, MAP, NO_SEED, RESET, SAVE, STEP, Pending, SharedSteps
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.envs.env_row import Crash, EnvArrays, EnvState
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.protocol import Rows
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.envs.single_envs import SingleEnvs
from cormorant_worker.fork_server import ENVIRONMENTS, fork_server
from cormorant_worker.spaces import Arrays
from cormorant_worker.wire import MessageSocket

log = structlog.get_logger(__name__)

_LOOK_AGAIN_S = 0.05
"""How long a missed wake-up may go unnoticed: see `Pending.settle`."""
_CLOSE_TIMEOUT_S = 3.0
_KILL_TIMEOUT_S = 5.0
_MESSAGE_TIMEOUT_S = 10.0
"""How long the rest of a message may take once it began."""
_NOWHERE = -1
"""Stands for the descriptor of a process that is gone; writing to it is an OSError."""
_REPORT = -1
"""Stands for a row where the selector names what became readable: the pipe by which children wake their parent."""


class EnvProcess:
    """One child. Started by the constructor, which returns at once; ended by `kill`, or CLOSE and `join`. `build` is
    its first message, `block` the memory that all children of a SubprocessVectorEnv share, `report` the writing end of
    the pipe by which they wake their parent.
    """

    def __init__(self, row: int, build: object, *, block: int, report: int) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_MESSAGE_TIMEOUT_S)
        self.connection = MessageSocket(ours)
        wake, self.wake_descriptor = os.pipe()
        """Write one byte to wake the child."""
        self._fork_server = fork_server(ENVIRONMENTS)
        with theirs:
            self._number = self._fork_server.fork(f"env-{row}", (theirs.fileno(), wake, block, report))
        os.close(wake)
        self.is_running = True
        with contextlib.suppress(OSError):  # gone: `_look` finds out
            self.connection.send(build)

    @property
    def pid(self) -> int:
        return self._fork_server.status(self._number).pid

    def describe_end(self) -> str:
        """How it ended. Called when nothing more could be received."""
        return self._fork_server.describe_end(self._number)

    def wake(self, command: bytes, message: Any = None) -> None:
        """Send one command, and the message that belongs to it. A child that is gone is found by `_look`."""
        if not self.is_running:  # the descriptor may already belong to another file
            return
        with contextlib.suppress(OSError):
            os.write(self.wake_descriptor, command)
            if command == LOAD:
                self.connection.send(message)

    def kill(self) -> None:
        """End it and what it started, at once. May be called twice."""
        if not self.is_running:
            return
        self.is_running = False
        self._fork_server.kill(self._number)
        # In an uninterruptible system call even SIGKILL waits: then it is left to the kernel, and to the fork server.
        self._fork_server.wait(self._number, _KILL_TIMEOUT_S)
        self.connection.close()
        os.close(self.wake_descriptor)

    def join(self, *, deadline: float) -> None:
        """Wait for its end until `deadline` (time.monotonic), then kill it."""
        if self.is_running:
            self._fork_server.wait(self._number, max(0.0, deadline - time.monotonic()))
            self.kill()


class SubprocessVectorEnv(SingleEnvs[EnvProcess]):
    """A process for each environment. One that crashes, exits, is killed or does not answer in time is replaced alone.
    Ctrl-C reaches this process only, and the children die with it, however it ends.

    Args:
        step_timeout_s: how long one vector step may take, resets at ends of episodes included.
        reset_timeout_s: how long building one environment and its first reset may take. At the start, when all are
            built at once, each round of as many environments as there are processors may take this long.
        more: see `SingleEnvs`; errors have the child's traceback as a note.
    """

    _last_side = 1

    def __init__(
        self,
        factory: EnvSource,
        *,
        seeds: Sequence[int],
        step_timeout_s: float = 60.0,
        reset_timeout_s: float = 60.0,
        **more: Any,
    ) -> None:
        num_envs = len(seeds)
        self._step_timeout_s = step_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._start_timeout_s = reset_timeout_s * math.ceil(num_envs / available_cpus())
        self._steps = np.zeros(num_envs, dtype=np.int64)
        """[n] completed by the process that is now in the row."""
        self._episodes = np.zeros(num_envs, dtype=np.int64)
        """[n] likewise, where processes are replaced after some."""
        self._descriptors = [_NOWHERE] * num_envs
        """Descriptors that wake the process of each row."""
        self._answers: dict[int, Any] = {}
        """Answers of children, by row, until `_take_answers`."""
        self._selector = selectors.DefaultSelector()
        self._limits: RestartLimits = more.get("limits", RestartLimits())
        self._recycles = bool(self._limits.recycle_episodes or self._limits.recycle_rss_mib)
        self._block = os.memfd_create("cormorant-envs")
        os.ftruncate(self._block, num_envs)
        self._pending = Pending(self._block, num_envs)
        self._report, self._report_end = os.pipe()
        os.set_blocking(self._report, False)
        self._selector.register(self._report, selectors.EVENT_READ, _REPORT)
        super().__init__(factory, seeds=seeds, **more)

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Wake the processes of `rows`. Returns at once."""
        super().send(actions, rows)
        self._pending.rows[rows] = 1
        command, write, descriptors = STEP[self._side], os.write, self._descriptors
        for descriptor in descriptors if isinstance(rows, slice) else [descriptors[row] for row in rows]:
            try:  # noqa: SIM105 - costs nothing here, and `suppress` half a microsecond
                write(descriptor, command)
            except OSError:
                pass  # `recv` finds the dead child

    def restart(self, rows: Rows) -> Arrays:
        self._check_open()
        if self._recycles:  # that ends episodes, too
            self._recycle(rows)
        return super().restart(rows)

    def close(self) -> None:
        """End every process, within seconds. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._under_way = None
        for row, process in self._running.items():
            if self._pending.rows[row]:
                process.kill()
            else:
                process.wake(CLOSE)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for process in self._running.values():
            process.join(deadline=deadline)
        self._selector.close()
        for descriptor in (self._block, self._report, self._report_end):
            os.close(descriptor)
        for name in ("_pending", "_memory", "_arrays", "illegal"):  # mapped until the receiver drops its last view
            vars(self).pop(name, None)

    def _build(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._steps[row], self._episodes[row], self._pending.rows[row] = 0, 0, 1
            build = self._factory, row, self.num_envs, self._info
            process = self._running[row] = EnvProcess(row, build, block=self._block, report=self._report_end)
            self._selector.register(process.connection, selectors.EVENT_READ, row)
            self._descriptors[row] = process.wake_descriptor
        self._settle(self._limit_s, "was not built")
        for row, built in sorted(self._take_answers().items()):
            self._learn(row, *built)
            self._running[row].wake(MAP)

    def _lay_out(self) -> EnvArrays:
        spaces = self.observation_space, self.action_space
        self._memory = SharedSteps(self._block, *spaces, self.num_envs, self._info)
        return self._memory.arrays

    def _reset(self, rows: Iterable[int], *, is_seeded: bool = False) -> None:
        for row in rows:
            self._memory.seeds[row] = self._restarts.seeds[row] if is_seeded else NO_SEED
            self._pending.rows[row] = 1
            self._running[row].wake(RESET[self._side])
        self._settle(self._limit_s, "returned no first observation")

    def _step(self, rows: slice | Rows) -> None:
        if self._dead:
            self._pending.rows[list(self._dead)] = 0
        self._settle(self._step_timeout_s, "did not answer")
        self._steps[rows] += 1
        if self._dead:
            self._steps[list(self._dead)] = 0
        if self._recycles:
            self._recycle(self._numbers[rows][self._written.terminated[rows] | self._written.truncated[rows]])

    def _recycle(self, rows: Rows) -> None:
        """Replace the processes of rows whose episode is over and that are over a limit. What they wrote of this step
        stays, but for the first observation of the next episode.
        """
        due = []
        for row in rows.tolist():
            if row in self._dead:
                continue
            self._episodes[row] += 1
            rss_mib = 0
            if self._limits.recycle_rss_mib:
                import psutil  # few jobs need it

                with contextlib.suppress(psutil.NoSuchProcess):
                    rss_mib = psutil.Process(self._running[row].pid).memory_info().rss >> 20
            if rss_mib > self._limits.recycle_rss_mib or 0 < self._limits.recycle_episodes <= self._episodes[row]:
                log.info("env_recycled", env=row, episodes=int(self._episodes[row]), rss_mib=rss_mib)
                due.append(row)
        for row in due:
            self._running[row].wake(CLOSE)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for row in due:
            process = self._running.pop(row)
            self._selector.unregister(process.connection)
            process.join(deadline=deadline)
            self._restarts.renew(row)
        self._build(due)
        self._reset([row for row in due if row not in self._dead], is_seeded=True)

    def _has_stepped(self) -> bool:
        return bool(self._steps.any())

    def _end(self, row: int, process: EnvProcess) -> None:
        self._selector.unregister(process.connection)
        process.kill()
        self._descriptors[row] = _NOWHERE  # the number may soon be reused for another file
        self._steps[row] = self._pending.rows[row] = 0
        self._answers.pop(row, None)

    @property
    def _limit_s(self) -> float:
        return self._start_timeout_s if self._starting else self._reset_timeout_s

    def _ask(self, states: Sequence[EnvState] = ()) -> Mapping[int, EnvState | str]:
        for row, process in self._running.items():
            self._pending.rows[row] = 1
            process.wake(LOAD if states else SAVE, states[row] if states else None)
        self._settle(self._reset_timeout_s, "did not answer")
        return self._take_answers()

    def _take_answers(self) -> dict[int, Any]:
        self._look(0.0)  # an answer is sent before the row's byte is cleared: all of them have come by now
        answers, self._answers = self._answers, {}
        return answers

    def _settle(self, timeout_s: float, what: str) -> None:
        """Wait until no row is pending. A row that fails is dead then, also one that `what` within the time limit."""
        deadline = time.monotonic() + timeout_s
        while not self._pending.is_settled():
            self._look(_LOOK_AGAIN_S)
            if time.monotonic() > deadline:
                for row in np.flatnonzero(self._pending.rows).tolist():
                    self._lose(Crash(row=row, what=f"{what} within {timeout_s:g} s", steps=int(self._steps[row])))

    def _look(self, timeout_s: float) -> None:
        """Receive what children have said between steps: answers, or how they failed."""
        for key, _ in self._selector.select(timeout_s):
            row = key.data
            if row == _REPORT:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._report, 4096)
                continue
            process = self._running[row]
            try:
                message = process.connection.receive()[0]
            except (EOFError, OSError):
                message = Crash(row=row, what=process.describe_end(), steps=int(self._steps[row]))
            if isinstance(message, Crash):
                self._lose(message)
            else:
                self._answers[row] = message
