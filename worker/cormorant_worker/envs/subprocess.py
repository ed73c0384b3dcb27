"""Gymnasium environments in processes of their own: parallel, and each one crashes, hangs and restarts alone.

Life of one process:

    BUILDING -> IDLE -> (send | reset | save | load) -> PENDING -> settles -> IDLE
    anywhere -> crash or time limit -> killed, DEAD -> (its row is wanted) -> a new process with a new seed, row fresh
"""

import contextlib
import math
import os
import selectors
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cormorant_worker.envs.channel import (
    CLOSE,
    LOAD,
    MAP,
    NO_SEED,
    RESET,
    SAVE,
    STEP,
    BuildReply,
    BuildRequest,
    ChildFailed,
    Pending,
    Saved,
    SharedSteps,
)
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.envs.env_process import EnvProcess
from cormorant_worker.envs.env_row import NanCheck, StepArrays
from cormorant_worker.envs.gymnasium_env import EnvSource, check_same, words_of
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.protocol import EVERY_ROW, Rows, Step, VectorEnv
from cormorant_worker.envs.restarts import Crash, RestartLimits, Restarts
from cormorant_worker.envs.saved import pack, unpack
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvNotSaved, StateError, UnknownEnv
from cormorant_worker.shared_memory import anonymous_file
from cormorant_worker.spaces import Arrays

_LOOK_AGAIN_S = 0.05
"""How long a missed wake-up may go unnoticed: see `Pending.settle`."""
_CLOSE_TIMEOUT_S = 3.0
_NOWHERE = -1
"""Stands for the descriptor of a process that is gone; writing to it is an OSError."""
_REPORT = -1
"""Stands for a row where the selector names what became readable: the pipe by which children wake their parent."""


class SubprocessVectorEnv(VectorEnv):
    """num_envs gymnasium environments, a process each, in lockstep.

    Used by one thread. A process that crashes, exits, is killed or does not answer in time is replaced alone, with a
    new seed; the others' steps are kept, and its row comes back fresh. Ctrl-C reaches this process only, and the
    children die with it, however it ends.

    Args:
        factory: builds each environment, in its own process.
        seeds: one an environment; environment i is first reset with `seeds[i]`, later without a seed.
        step_timeout_s: how long one vector step may take, resets at ends of episodes included.
        reset_timeout_s: how long building one environment may take, and its first reset. At the start all are built
            at once: then the limit holds for as many environments as there are processors.
        limits: how many restarts are too many.
        info: which values of `info` come with every step.

    Raises:
        UnknownEnv, EnvBuildError: the environment could not be built; the child's traceback is a note of the error.
    """

    def __init__(
        self,
        factory: EnvSource,
        *,
        seeds: Sequence[int],
        step_timeout_s: float = 60.0,
        reset_timeout_s: float = 60.0,
        limits: RestartLimits = RestartLimits(),  # noqa: B008 - frozen
        info: Sequence[InfoField] = (),
    ) -> None:
        num_envs = self.num_envs = len(seeds)
        self._factory = factory
        self._step_timeout_s = step_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._start_timeout_s = reset_timeout_s * math.ceil(num_envs / available_cpus())
        self._restarts = Restarts(seeds, limits)
        self._steps = np.zeros(num_envs, dtype=np.int64)
        """[n] completed by the process that is now in the row."""
        self._numbers = np.arange(num_envs)
        self._side = 0
        self._under_way: slice | Rows | None = None
        self._dead: dict[int, Crash] = {}
        """Rows without a process; replaced when they are next wanted."""
        self._answers: dict[int, Any] = {}
        """What children sent, by row, until `_take_answers`."""
        self._info = tuple(info)
        self._words = ""
        """What describes the spaces, once they are known."""
        self._starting = True
        self._closed = False
        self._processes: list[EnvProcess] = []
        self._selector = selectors.DefaultSelector()
        self._block = anonymous_file("cormorant-envs")
        os.ftruncate(self._block, num_envs)
        self._pending = Pending(self._block, num_envs)
        self._report, self._report_end = os.pipe()
        os.set_blocking(self._report, False)
        self._selector.register(self._report, selectors.EVENT_READ, _REPORT)
        try:
            for row in range(num_envs):
                self._processes.append(self._spawn(row))
            self._descriptors = [process.wake_descriptor for process in self._processes]
            self._finish_building(self._start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def restarts(self) -> int:
        return self._restarts.count

    def start(self) -> Arrays:
        self._check_open()
        self._starting = True
        self._under_way = None
        self._replace(list(self._dead))  # where this is not the first start
        self._reset(range(self.num_envs), self._start_timeout_s, is_seeded=True)
        self._starting = False
        obs = tuple(obs.copy() for obs in self._written.obs)
        self._nan.look(obs, EVERY_ROW)
        return obs

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Wake the processes of `rows`. Returns at once."""
        self._check_open()
        if self._under_way is not None:
            raise RuntimeError("send was called twice without recv; these environments step in lockstep")
        for target, values in zip(self._memory.arrays.actions, actions, strict=True):
            if values.dtype != target.dtype and not np.can_cast(values.dtype, target.dtype, "same_kind"):
                raise TypeError(f"actions of dtype {values.dtype} do not fit {target.dtype}: {self.action_space}")
            target[rows] = values
        self._side = 1 - self._side
        self._under_way = rows
        self._pending.rows[rows] = 1
        command, write, descriptors = STEP[self._side], os.write, self._descriptors
        for descriptor in descriptors if isinstance(rows, slice) else [descriptors[row] for row in rows]:
            try:  # noqa: SIM105 - costs nothing here, and `suppress` half a microsecond
                write(descriptor, command)
            except OSError:
                pass  # `recv` finds the dead child

    def recv(self) -> Step:
        rows = self._under_way
        if rows is None:
            raise RuntimeError("recv was called without send")
        self._under_way = None
        if self._dead:
            self._pending.rows[list(self._dead)] = 0
        self._settle(self._step_timeout_s, "did not answer")
        self._steps[rows] += 1
        fresh = self._revive(rows) if self._dead else []
        return self._written.read(rows, self._numbers[rows], fresh, self._nan)

    def restart(self, rows: Rows) -> Arrays:
        self._check_open()
        self._side = 1 - self._side
        self._reset([row for row in rows.tolist() if row not in self._dead], self._reset_timeout_s)
        self._revive(rows)
        obs = tuple(obs[rows] for obs in self._written.obs)
        self._nan.look(obs, rows)
        return obs

    def state(self) -> bytes:
        """The environments' own states and the seeds.

        Raises:
            EnvNotSaved: naming what one of them lacks.
            EnvCrashed: an environment did not answer, or its get_state raised.
        """
        self._check_idle("state")
        answers = self._ask(SAVE, [None] * self.num_envs)
        if self._dead:
            row, crash = min(self._dead.items())
            raise EnvCrashed(f"environment {row} could not be saved: it {crash.what}", details=crash.details)
        saved = [answers[row] for row in range(self.num_envs)]
        if why_not := next((answer.why_not for answer in saved if answer.why_not), ""):
            raise EnvNotSaved(why_not)
        return pack([answer.state for answer in saved], self._restarts.state())

    def restore(self, state: bytes) -> None:
        """Go on from `state()`.

        Raises:
            StateError: it comes from other environments, or an environment refused it or did not answer. The others
                have taken theirs: begin new episodes everywhere, with `restart`.
        """
        self._check_idle("restore")
        envs, restarts = unpack(state, num_envs=self.num_envs)
        self._revive(EVERY_ROW)
        answers = self._ask(LOAD, [Saved(state=part) for part in envs])
        refusals = {row: answer.why_not for row, answer in answers.items() if answer.why_not}
        refusals |= {row: f"it {crash.what}" for row, crash in self._dead.items()}
        if refusals:
            row, why_not = min(refusals.items())
            raise StateError(f"environment {row} could not take its state: {why_not}")
        self._restarts.restore(**restarts)

    def close(self) -> None:
        """End every process, within seconds. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._under_way = None
        for process in self._processes:
            if self._pending.rows[process.row]:
                process.kill()
            else:
                process.wake(CLOSE)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for process in self._processes:
            process.join(deadline=deadline)
        self._selector.close()
        for descriptor in (self._block, self._report, self._report_end):
            os.close(descriptor)
        del self._pending
        if self._words:
            del self._memory  # mapped until the receiver drops its last view
            self.illegal = None

    # Starting and replacing

    def _spawn(self, row: int) -> EnvProcess:
        self._pending.rows[row] = 1
        build = BuildRequest(factory=self._factory, row=row, num_envs=self.num_envs, info=self._info)
        process = EnvProcess(build, block=self._block, report=self._report_end)
        self._selector.register(process.connection, selectors.EVENT_READ, row)
        return process

    def _finish_building(self, timeout_s: float) -> None:
        """Wait until all that were spawned are built or dead, and have them map the arrays."""
        self._settle(timeout_s, "was not built")
        for row, built in sorted(self._take_answers().items()):
            words = words_of(built.observation_space, built.action_space) + "".join(
                f", {field.key} {field.dtype}{list(field.leaf.shape)} in info" for field in built.info
            )
            if not self._words:
                self._words = words
                self._lay_out(built)
            whose, called = f"the environments of {self._factory.name}", self._factory.called
            check_same(whose, [(called(0), self._words), (called(row), words)])
            self._processes[row].wake(MAP)

    def _lay_out(self, built: BuildReply) -> None:
        self.observation_space, self.action_space = built.observation_space, built.action_space
        self._info = built.info
        self.info_leaves = tuple(field.leaf for field in built.info)
        self._nan = NanCheck(self.observation_space)
        self._memory = SharedSteps(self._block, self.observation_space, self.action_space, self.num_envs, self._info)
        self.illegal = self._memory.arrays.illegal

    def _reset(self, rows: Sequence[int], timeout_s: float, *, is_seeded: bool = False) -> None:
        """Begin an episode in rows that have a process, or lose it."""
        for row in rows:
            self._memory.seeds[row] = self._restarts.seed(row) if is_seeded else NO_SEED
            self._pending.rows[row] = 1
            self._processes[row].wake(RESET[self._side])
        self._settle(timeout_s, "returned no first observation")

    def _replace(self, rows: Sequence[int]) -> None:
        """Start new processes in dead rows, and wait until they are built, or dead again."""
        self._steps[rows] = 0
        for row in rows:
            self._restarts.record(self._dead.pop(row), has_stepped=bool(self._steps.any()))
            self._processes[row] = process = self._spawn(row)
            self._descriptors[row] = process.wake_descriptor
        self._finish_building(self._reset_timeout_s)

    def _revive(self, rows: slice | Rows) -> list[int]:
        """Replace what is dead of `rows`, again where that fails. Returns the rows that have begun a new episode."""
        wanted, revived = set(self._numbers[rows].tolist()), set[int]()
        while dead := sorted(wanted & self._dead.keys()):
            self._replace(dead)
            self._reset([row for row in dead if row not in self._dead], self._reset_timeout_s, is_seeded=True)
            revived.update(dead)
        arrays, fresh = self._written, sorted(revived)
        arrays.reward[fresh] = 0.0
        arrays.terminated[fresh] = arrays.truncated[fresh] = False
        return fresh

    def _lose(self, crash: Crash) -> None:
        """A process has failed, hangs or is gone: end it. Its row is dead."""
        row = crash.row
        if self._starting:
            raise EnvBuildError(
                f"environment {row} ({self._factory.name}) {crash.what} before its first step", details=crash.details
            )
        process = self._processes[row]
        self._selector.unregister(process.connection)
        process.kill()
        self._descriptors[row] = _NOWHERE  # the number may soon be reused for another file
        self._pending.rows[row] = 0
        self._answers.pop(row, None)
        self._dead[row] = crash

    # Asking and waiting

    def _ask(self, command: bytes, messages: Sequence[Any]) -> dict[int, Any]:
        """Send a command and a message to every row that has a process. Returns the answers of those that gave one."""
        for process, message in zip(self._processes, messages, strict=True):
            if process.row not in self._dead:
                self._pending.rows[process.row] = 1
                process.wake(command, message)
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
        # Reads the messages of all children that have sent one.
        for key, _ in self._selector.select(timeout_s):
            if key.data == _REPORT:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._report, 4096)
            else:
                self._hear(key.data)

    def _hear(self, row: int) -> None:
        """Receive what a child says between steps: an answer, or how it failed."""
        process = self._processes[row]
        try:
            message = process.receive()
        except EOFError:
            self._lose(Crash(row=row, what=process.ending(), steps=int(self._steps[row])))
            return
        if not isinstance(message, ChildFailed):
            self._answers[row] = message
            return
        match message.kind:
            case "unknown_env":
                raise UnknownEnv(message.what)
            case "bad_observation":
                has_stepped = self._restarts.has_stepped or bool(self._steps.any() or message.steps)
                raise EnvCrashed(message.what, row=row, has_stepped=has_stepped, details=message.details)
            case "build" if self._starting:
                raise EnvBuildError(message.what, details=message.details)
        what = message.what if message.kind == "raised" else f"could not be built again: {message.what}"
        self._lose(Crash(row=row, what=what, steps=message.steps, details=message.details))

    @property
    def _written(self) -> StepArrays:
        return self._memory.arrays.sides[self._side]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("these environments are closed")

    def _check_idle(self, what: str) -> None:
        self._check_open()
        if self._under_way is not None:
            raise RuntimeError(f"{what} was called while rows are in flight; call recv first")
