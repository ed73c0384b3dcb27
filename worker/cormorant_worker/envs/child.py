"""The process of one environment of a SubprocessVectorEnv. Never imports torch. `python -m cormorant_worker.envs.child
SOCKET` is the fork server of such processes.
"""

import contextlib
import ctypes
import os
import random
import signal
import socket

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
    Pending,
    SharedSteps,
)
from cormorant_worker.envs.env_row import Crash, EnvRow
from cormorant_worker.envs.info import complete_fields
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
            steps = child.row.steps if child.row else 0
            connection.send(Crash.of(error, row=child.number, steps=steps))
        return 1
    return 0


class _Child:
    def __init__(self, connection: MessageSocket, *, wake: int, block: int, report: int) -> None:
        self._connection = connection
        self._wake, self._block, self._report = wake, block, report
        self.number = -1
        self.row: EnvRow | None = None

    def serve(self) -> None:
        build: BuildRequest = self._connection.receive()[0]
        pending, number = Pending(self._block, build.num_envs), build.row
        self.number = number
        env = build.factory.build(number)
        info = complete_fields(build.info, env, build.factory.name)
        spaces = env.observation_space, env.action_space
        self._connection.send(BuildReply(observation_space=spaces[0], action_space=spaces[1], info=info))
        self._settle(pending, number)
        if os.read(self._wake, 1) != MAP:
            env.close()
            return
        shared = SharedSteps(self._block, *spaces, build.num_envs, info)
        row = self.row = EnvRow(env, number, shared.arrays, info)
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
                self._connection.send(row.save())
            elif command == LOAD:
                self._connection.send(row.load(self._connection.receive()[0]))
            else:  # CLOSE, or end of file
                env.close()
                return
            self._settle(pending, number)

    def _settle(self, pending: Pending, number: int) -> None:
        if pending.settle(number):
            os.write(self._report, b"\0")


if __name__ == "__main__":
    run(run_child)
