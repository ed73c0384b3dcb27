"""The process of one environment of a SubprocessVectorEnv. Never imports torch. `python -m cormorant_worker.envs.child
SOCKET` is the fork server of such processes.
"""

import contextlib
import ctypes
import os
import random
import signal
import socket
import traceback
from typing import Literal

import numpy as np

from cormorant_worker.envs.channel import (
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
from cormorant_worker.envs.env_row import BadObservation, EnvRow
from cormorant_worker.envs.info import complete_fields
from cormorant_worker.envs.saved import save_env
from cormorant_worker.errors import EnvBuildError, EnvNotSaved, UnknownEnv
from cormorant_worker.fork_server import run
from cormorant_worker.wire.messages import MessageSocket, PeerGone

_PR_SET_PDEATHSIG = 1


def run_child(socket_descriptor: int, wake: int, block: int, report: int) -> int:
    """Serve until the parent says close, or is gone. Returns the exit code.

    Args:
        socket_descriptor: of the socket to the parent.
        wake: reading end of the pipe that wakes this child: cheaper than its socket, once a step.
        block: the shared block.
        report: writing end of the pipe that wakes the parent.
    """
    # The fork server ends with our parent: then the kernel kills this process, even in the middle of an endless step.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    np.random.seed()  # forks begin with one generator; `random` reseeds itself
    connection = MessageSocket(socket.socket(fileno=socket_descriptor))
    child = _Child(connection, wake=wake, block=block, report=report)
    try:
        child.serve()
    except PeerGone:
        pass
    except BaseException as error:  # noqa: BLE001 - the process's edge: reports, whatever it was, sys.exit too
        with contextlib.suppress(OSError):
            connection.send(child.failure(error))
        return 1
    return 0


class _Child:
    def __init__(self, connection: MessageSocket, *, wake: int, block: int, report: int) -> None:
        self._connection = connection
        self._wake, self._block, self._report = wake, block, report
        self._row: EnvRow | None = None

    def serve(self) -> None:
        build: BuildRequest = self._connection.receive()[0]
        pending, number = Pending(self._block, build.num_envs), build.row
        env = build.factory.build(number)
        info = complete_fields(build.info, env, build.factory.name)
        spaces = env.observation_space, env.action_space
        self._connection.send(BuildReply(observation_space=spaces[0], action_space=spaces[1], info=info))
        self._settle(pending, number)
        if os.read(self._wake, 1) != MAP:
            env.close()
            return
        shared = SharedSteps(self._block, *spaces, build.num_envs, info)
        row = self._row = EnvRow(env, number, shared.arrays, info)
        step_sides, reset_sides = ({command: side for side, command in enumerate(of)} for of in (STEP, RESET))
        while True:
            command = os.read(self._wake, 1)
            if (side := step_sides.get(command, -1)) >= 0:
                row.step(side)
            elif command in reset_sides:
                seed = int(shared.seeds[number])
                if seed != NO_SEED:
                    # Environments that draw from these are seeded, too: no other code runs in this process.
                    random.seed(seed)
                    np.random.seed(seed)
                row.reset(seed=None if seed == NO_SEED else seed, side=reset_sides[command])
            elif command == SAVE:
                try:
                    answer = Saved(state=save_env(env))
                except EnvNotSaved as error:
                    answer = Saved(why_not=str(error))
                self._connection.send(answer)
            elif command == LOAD:
                saved: Saved = self._connection.receive()[0]
                answer = Saved()
                try:
                    row.load(saved.state)
                except Exception as error:  # noqa: BLE001 - the environment's own set_state may raise anything
                    answer = Saved(why_not=f"{type(error).__name__}: {error}")
                self._connection.send(answer)
            else:  # CLOSE, or end of file
                env.close()
                return
            self._settle(pending, number)

    def _settle(self, pending: Pending, number: int) -> None:
        if pending.settle(number):
            os.write(self._report, b"\0")

    def failure(self, error: BaseException) -> ChildFailed:
        kind: Literal["raised", "bad_observation", "unknown_env", "build"]
        kind, what = "raised", f"raised {type(error).__name__}: {error}"
        match error:
            case BadObservation():
                kind, what = "bad_observation", str(error)
            case UnknownEnv():
                kind, what = "unknown_env", str(error)
            case EnvBuildError():
                kind, what = "build", str(error)
        steps = self._row.steps if self._row else 0
        return ChildFailed(kind=kind, what=what, steps=steps, details="".join(traceback.format_exception(error)))


if __name__ == "__main__":
    run(run_child)
