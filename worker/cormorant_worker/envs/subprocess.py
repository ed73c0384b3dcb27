"""Gymnasium environments in processes of their own: parallel, and each one crashes, hangs and restarts alone.

Life of one process:

    BUILDING -> BuildReply -> IDLE -> (send | reset) -> PENDING -> settles -> IDLE
    anywhere -> crash or time limit -> killed -> a new process, BUILDING, with a new seed -> reset -> IDLE, row fresh
"""

import contextlib
import math
import os
import selectors
import time
from collections.abc import Iterable, Sequence

import numpy as np

from cormorant_worker.envs.channel import (
    CLOSE,
    LOAD,
    MAP,
    RESET,
    SAVE,
    STEP,
    BuildReply,
    BuildRequest,
    ChildFailed,
    Reset,
    Saved,
    SharedSteps,
    StateRefused,
)
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.envs.env_process import EnvProcess
from cormorant_worker.envs.env_row import NanCheck, StepArrays
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.protocol import EVERY_ROW, Rows, Step, VectorEnv
from cormorant_worker.envs.restarts import Crash, RestartLimits, Restarts
from cormorant_worker.envs.saved import pack, unpack
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvNotSaved, StateError, UnknownEnv
from cormorant_worker.shared_memory import anonymous_file
from cormorant_worker.spaces import Arrays, describe

_LOOK_AGAIN_S = 0.05
"""How long a missed wake-up may go unnoticed: see `SharedSteps.settle`."""
_CLOSE_TIMEOUT_S = 3.0
_NOWHERE = -1
"""Stands for the descriptor of a process that is gone; writing to it is an OSError."""


class SubprocessVectorEnv(VectorEnv):
    """num_envs gymnasium environments, a process each, in lockstep.

    Used by one thread. A process that crashes, exits, is killed or does not answer in time is replaced alone, with a
    new seed; the others' steps are kept, and its row comes back fresh. Ctrl-C reaches this process only, and the
    children die with it, however it ends.

    Args:
        factory: builds each environment, in its own process.
        seeds: one an environment; environment i is first reset with `seeds[i]`, later without a seed.
        step_timeout_s: how long one vector step may take, resets at ends of episodes included.
        reset_timeout_s: how long building and first resetting one environment may take. At the start all are built
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
        self._restarts = Restarts(seeds, limits)
        self._steps = np.zeros(num_envs, dtype=np.int64)
        """[n] completed by the process that is now in the row."""
        self._numbers = np.arange(num_envs)
        self._side = 0
        self._under_way: slice | Rows | None = None
        self._dead: dict[int, Crash] = {}
        """Rows whose process died while it was idle; replaced when they are next wanted."""
        self._replaced: dict[int, tuple[float, Crash]] = {}
        """Rows that are being replaced: when that began, and why."""
        self._refusals: dict[int, str] = {}
        """What rows said that did not take their states, heard while `_settle` waited."""
        self._info = tuple(info)
        self._starting = True
        self._closed = False
        self._processes: list[EnvProcess] = []
        self._selector = selectors.DefaultSelector()
        self._block = anonymous_file("cormorant-envs")
        self._report, self._report_end = os.pipe()
        self._life, self._life_end = os.pipe()
        os.set_blocking(self._report, False)
        self._selector.register(self._report, selectors.EVENT_READ, -1)
        try:
            self._build()
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
        self._replace_dead(EVERY_ROW)  # where this is not the first start
        alive = [row for row in range(self.num_envs) if row not in self._replaced]
        self._reset(alive, [self._restarts.seed(row) for row in alive])
        self._settle(self._start_timeout_s())
        self._finish_replacing()
        self._starting = False
        obs = tuple(obs.copy() for obs in self._written.obs)
        self._nan.look(obs, EVERY_ROW)
        return obs

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Wake the processes of `rows`. Returns at once."""
        self._check_open()
        if self._under_way is not None:
            raise RuntimeError("send was called twice without recv; these environments step in lockstep")
        memory = self._memory
        for target, values in zip(memory.arrays.actions, actions, strict=True):
            if values.dtype != target.dtype and not np.can_cast(values.dtype, target.dtype, "same_kind"):
                raise TypeError(f"actions of dtype {values.dtype} do not fit {target.dtype}: {self.action_space}")
            target[rows] = values
        self._side = 1 - self._side
        self._under_way = rows
        memory.pending[rows] = 1
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
        self._replace_dead(rows)
        self._settle(self._step_timeout_s)
        self._steps[rows] += 1
        return self._written.read(rows, self._numbers[rows], self._finish_replacing(), self._nan)

    def restart(self, rows: Rows) -> Arrays:
        self._check_open()
        self._side = 1 - self._side
        self._replace_dead(rows)
        alive = [int(row) for row in rows if int(row) not in self._replaced]
        self._reset(alive, [None] * len(alive))
        self._settle(self._reset_timeout_s)
        self._finish_replacing()
        obs = tuple(obs[rows] for obs in self._written.obs)
        self._nan.look(obs, rows)
        return obs

    def state(self) -> bytes:
        """The environments' own states and the seeds.

        Raises:
            EnvNotSaved: naming what one of them lacks.
            EnvCrashed: an environment did not answer, or its get_state raised.
        """
        self._check_open()
        self._check_idle("state")
        for process in self._processes:
            process.wake(SAVE)
        # Read every answer, even after a failure: one left in its socket would be taken for the next answer.
        answers = [self._answer(process) for process in self._processes]
        if failed := [answer for answer in answers if isinstance(answer, EnvCrashed)]:
            raise failed[0]
        saved = [answer for answer in answers if isinstance(answer, Saved)]
        if why_not := next((answer.why_not for answer in saved if answer.why_not), ""):
            raise EnvNotSaved(why_not)
        return pack([answer.state for answer in saved], self._restarts.state())

    def restore(self, state: bytes) -> None:
        """Go on from `state()`.

        Raises:
            StateError: it comes from other environments, or an environment refused it or did not answer. The others
                have taken theirs: begin new episodes everywhere, with `restart`.
        """
        self._check_open()
        self._check_idle("restore")
        envs, restarts = unpack(state, num_envs=self.num_envs)
        self._memory.pending[:] = 1
        for process, part in zip(self._processes, envs, strict=True):
            process.command(LOAD, Saved(state=part))
        self._settle(self._reset_timeout_s)
        refusals = {row: f"was replaced: it {crash.what}" for row, (_, crash) in self._replaced.items()}
        self._finish_replacing()
        self._look(0.0)  # a refusal is sent before the row's byte is cleared: all of them have come by now
        refusals |= self._refusals
        self._refusals = {}
        if refusals:
            row = min(refusals)
            raise StateError(f"environment {row} could not take its state: {refusals[row]}")
        self._restarts.restore(**restarts)

    def close(self) -> None:
        """End every process, within seconds. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._under_way = None
        busy = set(self._pending_rows())
        for process in self._processes:
            if process.row in busy:
                process.kill()
            else:
                process.wake(CLOSE)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for process in self._processes:
            process.join(deadline=deadline)
        self._selector.close()
        for descriptor in (self._block, self._report, self._report_end, self._life, self._life_end):
            os.close(descriptor)
        if hasattr(self, "_memory"):
            del self._memory  # mapped until the receiver drops its last view
            self.illegal = None

    # Starting and replacing

    def _build(self) -> None:
        self._processes = [self._spawn(row) for row in range(self.num_envs)]
        self._descriptors = [process.wake_descriptor for process in self._processes]
        timeout_s = self._start_timeout_s()
        deadline = time.monotonic() + timeout_s
        waiting = set(range(self.num_envs))
        while waiting:
            events = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                what = f"was not built within {timeout_s:g} s (reset_timeout_s)"
                self._handle(Crash(row=min(waiting), what=what, steps=0))
            for key, _ in events:
                built = self._hear(key.data)
                if isinstance(built, BuildReply):
                    self._map(self._processes[key.data], built)
                    waiting.discard(key.data)

    def _spawn(self, row: int) -> EnvProcess:
        build = BuildRequest(factory=self._factory, row=row, num_envs=self.num_envs, info=self._info)
        process = EnvProcess(build, life=self._life, block=self._block, report=self._report_end)
        self._selector.register(process.connection, selectors.EVENT_READ, row)
        return process

    def _map(self, process: EnvProcess, built: BuildReply) -> None:
        if not hasattr(self, "_first"):
            self._first, self._first_row = built, process.row
            self.observation_space, self.action_space = built.observation_space, built.action_space
            self._info = built.info
            self.info_leaves = tuple(field.leaf for field in built.info)
            self._nan = NanCheck(self.observation_space)
            self._memory = SharedSteps(
                self._block, self.observation_space, self.action_space, self.num_envs, self._info, create=True
            )
            self.illegal = self._memory.arrays.illegal
        ours, theirs = (
            f"observations {describe(each.observation_space)}, actions {describe(each.action_space)}"
            + "".join(f", {field.key} {field.dtype}{list(field.leaf.shape)} in info" for field in each.info)
            for each in (self._first, built)
        )
        if ours != theirs:
            called = self._factory.called
            raise EnvBuildError(
                f"the environments of {self._factory.name} have different spaces: {called(process.row)} has {theirs}; "
                f"{called(self._first_row)} has {ours}"
            )
        process.wake(MAP)

    def _reset(self, rows: Iterable[int], seeds: Sequence[int | None]) -> None:
        for row, seed in zip(rows, seeds, strict=True):
            self._memory.pending[row] = 1
            self._processes[row].command(RESET, Reset(seed=seed, side=self._side))

    def _replace_dead(self, rows: slice | Rows) -> None:
        if self._dead:
            for row in self._numbers[rows]:
                crash = self._dead.pop(int(row), None)
                if crash is not None:
                    self._replace(crash)

    def _replace(self, crash: Crash) -> None:
        # `_settle` waits for the first observation of the new process.
        row = crash.row
        self._drop(row)
        self._memory.pending[row] = 1
        self._restarts.record(crash, has_stepped=bool(self._steps.any()))
        self._steps[row] = 0
        self._processes[row] = process = self._spawn(row)
        self._descriptors[row] = process.wake_descriptor
        self._replaced[row] = (time.monotonic(), crash)

    def _drop(self, row: int) -> None:
        process = self._processes[row]
        if process.is_running:
            self._selector.unregister(process.connection)
            process.kill()
            self._descriptors[row] = _NOWHERE  # the number may soon be reused for another file

    def _finish_replacing(self) -> list[int]:
        """Returns the rows that were replaced since the last call."""
        if not self._replaced:
            return []
        now = time.monotonic()
        arrays = self._written
        rows = sorted(self._replaced)
        for row in rows:
            began, crash = self._replaced.pop(row)
            self._steps[row] = 0
            arrays.reward[row] = 0.0
            arrays.terminated[row] = arrays.truncated[row] = False
            self._restarts.tell(crash, seconds=now - began)
        return rows

    # Waiting

    def _settle(self, timeout_s: float) -> None:
        """Wait until no row is pending, replacing what fails; each wait is bounded by a time limit."""
        memory = self._memory
        deadline = time.monotonic() + timeout_s
        while not memory.is_settled():
            self._look(_LOOK_AGAIN_S)
            now = time.monotonic()
            if memory.is_settled() or (now < deadline and not self._replaced):
                continue
            for row in self._pending_rows():
                if row not in self._replaced and now > deadline:
                    limit = f"did not answer within {timeout_s:g} s"
                elif row in self._replaced and now > self._replaced[row][0] + self._reset_timeout_s:
                    limit = f"returned no first observation within {self._reset_timeout_s:g} s (reset_timeout_s)"
                else:
                    continue
                self._handle(Crash(row=row, what=limit, steps=int(self._steps[row])))

    def _look(self, timeout_s: float) -> None:
        # Reads the messages of all children that have sent one.
        for key, _ in self._selector.select(timeout_s):
            if key.data < 0:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._report, 4096)
                continue
            answer = self._hear(key.data)
            if isinstance(answer, StateRefused):
                self._refusals[key.data] = answer.what
            elif isinstance(answer, BuildReply):
                process = self._processes[key.data]
                self._map(process, answer)
                process.command(RESET, Reset(seed=self._restarts.seed(key.data), side=self._side))

    def _hear(self, row: int) -> object:
        """Receive what a child says between steps: BuildReply, or how it failed."""
        process = self._processes[row]
        try:
            message = process.receive()
        except EOFError:
            self._handle(Crash(row=row, what=process.ending(), steps=int(self._steps[row])))
            return None
        if not isinstance(message, ChildFailed):
            return message
        match message.kind:
            case "unknown_env":
                raise UnknownEnv(message.what)
            case "bad_observation":
                has_stepped = self._restarts.has_stepped or bool(self._steps.any() or message.steps)
                raise EnvCrashed(message.what, row=row, has_stepped=has_stepped, details=message.details)
            case "build" if self._starting:
                raise EnvBuildError(message.what, details=message.details)
        what = message.what if message.kind == "raised" else f"could not be built again: {message.what}"
        self._handle(Crash(row=row, what=what, steps=message.steps, details=message.details))
        return None

    def _handle(self, crash: Crash) -> None:
        if self._starting:
            raise EnvBuildError(
                f"environment {crash.row} ({self._factory.name}) {crash.what} before its first step",
                details=crash.details,
            )
        if self._memory.pending[crash.row]:
            self._replace(crash)
        else:
            self._drop(crash.row)
            self._dead[crash.row] = crash

    def _start_timeout_s(self) -> float:
        return self._reset_timeout_s * math.ceil(self.num_envs / available_cpus())

    def _pending_rows(self) -> list[int]:
        return [int(row) for row in np.flatnonzero(self._memory.pending)] if hasattr(self, "_memory") else []

    @property
    def _written(self) -> StepArrays:
        return self._memory.arrays.sides[self._side]

    def _answer(self, process: EnvProcess) -> Saved | EnvCrashed:
        details = ""
        try:
            answer = process.receive()
            if isinstance(answer, Saved):
                return answer
            what = "could not be saved"
            if isinstance(answer, ChildFailed):
                what, details = f"could not be saved: it {answer.what}", answer.details
        except EOFError:
            what = f"{process.ending()} while its state was saved"
        # It is replaced before its next step: an answer that comes late must not be taken for that of a later question.
        crash = Crash(row=process.row, what=what, steps=int(self._steps[process.row]), details=details)
        self._dead.setdefault(process.row, crash)
        return EnvCrashed(f"environment {process.row} {what}", details=details)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("these environments are closed")

    def _check_idle(self, what: str) -> None:
        if self._under_way is not None:
            raise RuntimeError(f"{what} was called while rows are in flight; call recv first")
        self._replace_dead(EVERY_ROW)
        if self._replaced:
            self._settle(self._reset_timeout_s)
            self._finish_replacing()
