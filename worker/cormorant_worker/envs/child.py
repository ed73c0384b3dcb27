"""The process of one environment of a SubprocessVectorEnv. Imports no more than it needs, and never torch.

python -c "from cormorant_worker.envs.child import main; main()" <socket> <life> <parent's pid>
"""

import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import socket
import sys
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
    Saved,
    StateRefused,
    receive_message,
    send_message,
)
from cormorant_worker.envs.env_row import BadObservation, EnvRow
from cormorant_worker.envs.info import complete_fields
from cormorant_worker.envs.saved import load_env, save_env
from cormorant_worker.envs.shared_memory import SharedSteps
from cormorant_worker.errors import EnvBuildError, EnvNotSaved, UnknownEnv

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent says close, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes us
    connection = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(life=int(sys.argv[2]), parent=int(sys.argv[3]))
    child = _Child(connection)
    try:
        child.serve()
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001 - the process's edge: reports, whatever it was, sys.exit too
        with contextlib.suppress(OSError):
            send_message(connection, child.failure(error))
        _exit(1)
    _exit(0)


def die_with_parent(*, life: int, parent: int) -> None:
    """Make the kernel kill this process when its parent is gone, even in the middle of an endless step.

    Args:
        life: reading end of a pipe whose only writing end is in the parent. The kernel signals its closing; unlike
            PR_SET_PDEATHSIG this does not fire when just the *thread* ends that started us.
        parent: the parent's pid when PR_SET_PDEATHSIG is wanted as well (started from its main thread), else 0.
    """
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    if sys.platform == "linux":
        own = os.open(f"/proc/self/fd/{life}", os.O_RDONLY)  # signals go to one owner an open file: we need our own
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
    poll = select.poll()
    poll.register(life, select.POLLHUP)
    if poll.poll(0):
        os._exit(1)


class _Child:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._row: EnvRow | None = None

    def serve(self) -> None:
        build: BuildRequest = receive_message(self._connection)
        env = build.factory.build(build.row)
        info = complete_fields(build.info, env, build.factory.name)
        reply = BuildReply(observation_space=env.observation_space, action_space=env.action_space, info=info)
        send_message(self._connection, reply)
        wake = build.wake
        if os.read(wake, 1) != MAP:
            env.close()
            return
        shared = SharedSteps(build.block, env.observation_space, env.action_space, build.num_envs, info, create=False)
        row = self._row = EnvRow(env, build.row, actions=shared.actions, sides=shared.sides, info=info)
        sides = {command: side for side, command in enumerate(STEP)}
        while True:
            command = os.read(wake, 1)
            side = sides.get(command, -1)
            if side >= 0:
                row.step(side)
            elif command == RESET:
                reset = receive_message(self._connection)
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
                send_message(self._connection, answer)
                continue
            elif command == LOAD:
                saved = receive_message(self._connection)
                try:
                    load_env(env, saved.state)
                except Exception as error:  # noqa: BLE001 - the environment's own set_state may raise anything
                    send_message(self._connection, StateRefused(what=f"{type(error).__name__}: {error}"))
            else:  # CLOSE, or end of file
                row.close()
                return
            if shared.settle(build.row):
                os.write(build.report, b"\0")

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


def _exit(code: int) -> None:
    """Leave at once: threads of the environment, or its atexit handlers, must not keep a dead child alive."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
