"""The process of one environment of a SubprocessVectorEnv. Never imports torch. `python -m cormorant_worker.envs.child
SOCKET` is the fork server of such processes.
"""

import contextlib
import fcntl
import os
import random
import select
import signal
import socket
import traceback
from typing import Literal

import numpy as np

from cormorant_worker.envs.channel import (
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
from cormorant_worker.envs.env_row import BadObservation, EnvRow
from cormorant_worker.envs.info import complete_fields
from cormorant_worker.envs.saved import save_env
from cormorant_worker.errors import EnvBuildError, EnvNotSaved, UnknownEnv
from cormorant_worker.fork_server import run
from cormorant_worker.wire.messages import MessageSocket, PeerGone


def run_child(socket_descriptor: int, wake: int, life: int, block: int, report: int) -> int:
    """Serve until the parent says close, or is gone. Returns the exit code.

    Args:
        socket_descriptor: of the socket to the parent.
        wake: reading end of the pipe that wakes this child: cheaper than its socket, once a step.
        life: reading end of a pipe whose only writing end is in the parent.
        block: the shared block.
        report: writing end of the pipe that wakes the parent.
    """
    die_with_parent(life)
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


def die_with_parent(life: int) -> None:
    """Make the kernel kill this process when its parent is gone, even in the middle of an endless step: it signals the
    closing of the other end of `life`.
    """
    own = os.open(f"/proc/self/fd/{life}", os.O_RDONLY)  # signals go to one owner an open file: we need our own
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
    poll = select.poll()
    poll.register(life, select.POLLHUP)
    if poll.poll(0):
        os._exit(1)


class _Child:
    def __init__(self, connection: MessageSocket, *, wake: int, block: int, report: int) -> None:
        self._connection = connection
        self._wake, self._block, self._report = wake, block, report
        self._row: EnvRow | None = None

    def serve(self) -> None:
        build: BuildRequest = self._connection.receive()[0]
        env = build.factory.build(build.row)
        info = complete_fields(build.info, env, build.factory.name)
        reply = BuildReply(
            pid=os.getpid(), observation_space=env.observation_space, action_space=env.action_space, info=info
        )
        self._connection.send(reply)
        wake = self._wake
        if os.read(wake, 1) != MAP:
            env.close()
            return
        shared = SharedSteps(self._block, env.observation_space, env.action_space, build.num_envs, info, create=False)
        row = self._row = EnvRow(env, build.row, shared.arrays, info)
        sides = {command: side for side, command in enumerate(STEP)}
        while True:
            command = os.read(wake, 1)
            side = sides.get(command, -1)
            if side >= 0:
                row.step(side)
            elif command == RESET:
                reset: Reset = self._connection.receive()[0]
                if reset.seed is not None:
                    # Environments that draw from these are seeded, too: no other code runs in this process.
                    random.seed(reset.seed)
                    np.random.seed(reset.seed)
                row.reset(seed=reset.seed, side=reset.side)
            elif command == SAVE:
                try:
                    answer = Saved(state=save_env(env))
                except EnvNotSaved as error:
                    answer = Saved(why_not=str(error))
                self._connection.send(answer)
                continue
            elif command == LOAD:
                saved: Saved = self._connection.receive()[0]
                try:
                    row.load(saved.state)
                except Exception as error:  # noqa: BLE001 - the environment's own set_state may raise anything
                    self._connection.send(StateRefused(what=f"{type(error).__name__}: {error}"))
            else:  # CLOSE, or end of file
                env.close()
                return
            if shared.settle(build.row):
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
