"""The process of one environment of a SubprocessVectorEnv. Never imports torch. `python -m cormorant_worker.envs.child
SOCKET` is the fork server of such processes.
"""

import contextlib
import os
import random
import socket

import numpy as np

from cormorant_worker.envs.channel import LOAD, MAP, NO_SEED, RESET, SAVE, STEP, BuildRequest, Pending, SharedSteps
from cormorant_worker.envs.env_row import Crash, EnvRow
from cormorant_worker.envs.info import complete_fields
from cormorant_worker.fork_server import run
from cormorant_worker.wire import MessageSocket, PeerGone

_STEP_SIDES, _RESET_SIDES = ({command: side for side, command in enumerate(of)} for of in (STEP, RESET))


def run_child(socket_descriptor: int, wake: int, block: int, report: int) -> int:
    """Serve until the parent says close, or is gone; returns the exit code. `wake`: read end of the pipe that wakes
    this child at each step, cheaper than the socket; `block`: the shared block; `report`: write end of the pipe that
    wakes the parent.
    """
    np.random.seed()  # forks begin with one generator; `random` reseeds itself
    connection = MessageSocket(socket.socket(fileno=socket_descriptor))
    number, row = -1, None
    try:
        build: BuildRequest = connection.receive()[0]
        number = build.row
        pending = Pending(block, build.num_envs)

        def settle() -> None:
            if pending.settle(number):
                os.write(report, b"\0")

        env = build.factory.build(number)
        info = complete_fields(build.info, env, build.factory.name)
        spaces = env.observation_space, env.action_space
        connection.send((*spaces, info))
        settle()
        if os.read(wake, 1) == MAP:
            shared = SharedSteps(block, *spaces, build.num_envs, info)
            row = EnvRow(env, number, shared.arrays, info)
            while True:
                command = os.read(wake, 1)
                if (side := _STEP_SIDES.get(command, -1)) >= 0:
                    row.step(side)
                elif (side := _RESET_SIDES.get(command, -1)) >= 0:
                    seed = int(shared.seeds[number])
                    if seed != NO_SEED:
                        # Environments that draw from these are seeded, too: no other code runs in this process.
                        random.seed(seed)
                        np.random.seed(seed)
                    row.reset(seed=None if seed == NO_SEED else seed, side=side)
                elif command == SAVE:
                    connection.send(row.save())
                elif command == LOAD:
                    connection.send(row.load(connection.receive()[0]))
                else:  # CLOSE, or end of file
                    break
                settle()
        env.close()
    except PeerGone:
        pass
    except BaseException as error:  # noqa: BLE001 - the process's edge: reports, whatever it was, sys.exit too
        with contextlib.suppress(OSError):
            connection.send(Crash.of(error, row=number, steps=row.steps if row else 0))
        return 1
    return 0


if __name__ == "__main__":
    run(run_child)
