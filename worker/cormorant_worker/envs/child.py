"""The process of one environment of a SubprocessVectorEnv, and how the two communicate: single bytes over a pipe, one
block of shared memory, and messages over a socket for rare events. Never imports torch. `python -m
cormorant_worker.envs.child SOCKET` is the fork server of such processes.

    parent                                    child
    source, row, number of
    rows, fields of info   ->
                           <-                 observation space, action space, info fields with dtypes and shapes
    MAP                    ->                 maps the shared arrays
    RESET_SIDE_0 | _1      ->                 resets
    STEP_SIDE_0 | _1       ->                 steps
    SAVE                   ->
                           <-                 its state, or why it has none
    LOAD, state            ->
                           <-                 why it could not take the state; empty: it did
    CLOSE (or end of file) ->                 closes its environment and exits

A child that has built its environment or done what it was told, and sent its answer, clears its pending byte. One that
fails sends a Crash instead, at any time, and exits.
"""

import contextlib
import mmap
import os
import random
import socket
import threading
from collections.abc import Sequence

import numpy as np

from cormorant_worker.envs.env_row import Crash, EnvArrays, EnvRow
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.info import InfoField, complete_fields
from cormorant_worker.fork_server import run
from cormorant_worker.spaces import Array, Space
from cormorant_worker.wire import ArrayCursor, MessageSocket, PeerGone

STEP, RESET = (b"0", b"1"), (b"r", b"R")
"""Step or reset, and write into this side."""
MAP, SAVE, LOAD, CLOSE = b"m", b"s", b"l", b"c"
NO_SEED = -1
_PENDING = b"\x01"
_LOCK = threading.Lock()


class Pending:
    """The first part of the block: [n] bytes, 1 while a row is built, reset, stepped, saved or restored; set by the
    parent, cleared by the child.
    """

    def __init__(self, block: int, num_envs: int) -> None:
        """Map a block from `memfd_create`, which has been given at least this size."""
        self._num_envs = num_envs
        self._map = mmap.mmap(block, num_envs)
        self.rows: Array = np.frombuffer(self._map, np.uint8)

    def is_settled(self) -> bool:
        return self._map.find(_PENDING, 0, self._num_envs) < 0

    def settle(self, row: int) -> bool:
        """Called by a child: `row` is done and written. Returns whether it was the last one.

        Two children that finish at the same instant may both get True. The fences prevent both from getting False on
        processors that reorder writes; the parent also checks periodically, so correctness does not depend on them.
        """
        # The lock's atomic operations are fences: what is written before is seen before what is written after.
        with _LOCK:
            pass
        self._map[row] = 0
        with _LOCK:
            pass
        return self.is_settled()


class SharedSteps:
    """The rest of the block: what num_envs environments read and write. Parent and children make the same arrays from
    the same spaces. The block is a nameless file: when the last process that maps it dies, it is gone.

        seeds     [n] int64, of the next reset; written by the parent
        actions   written by the parent
        illegal   written by the children, read while they are idle
        sides     two in turn: what `recv` handed out stays as it is until the next `recv`
    """

    def __init__(
        self, block: int, observation_space: Space, action_space: Space, num_envs: int, info: Sequence[InfoField]
    ) -> None:
        def lay_out(cursor: ArrayCursor) -> None:
            cursor.take((num_envs,), np.dtype(np.uint8))  # Pending
            self.seeds = cursor.take((num_envs,), np.dtype(np.int64))
            self.arrays = EnvArrays(observation_space, action_space, num_envs, info, cursor.take, num_sides=2)

        lay_out(measure := ArrayCursor())
        os.ftruncate(block, measure.size_bytes)  # as the others do
        lay_out(ArrayCursor(mmap.mmap(block, measure.size_bytes)))


def run_child(socket_descriptor: int, wake: int, block: int, report: int) -> int:
    """Serve until the parent says close, or is gone; returns the exit code. `wake`: read end of the pipe that wakes
    this child at each step, cheaper than the socket; `block`: the shared block; `report`: write end of the pipe that
    wakes the parent.
    """
    np.random.seed()  # forks begin with one generator; `random` reseeds itself
    connection = MessageSocket(socket.socket(fileno=socket_descriptor))
    number, row = -1, None
    try:
        source: EnvSource
        source, number, num_envs, fields = connection.receive()[0]
        pending = Pending(block, num_envs)

        def settle() -> None:
            if pending.settle(number):
                os.write(report, b"\0")

        env = source.build(number)
        info = complete_fields(fields, env, source.name)
        spaces = env.observation_space, env.action_space
        connection.send((*spaces, info))
        settle()
        if os.read(wake, 1) == MAP:
            shared = SharedSteps(block, *spaces, num_envs, info)
            row = EnvRow(env, number, shared.arrays, info)
            while True:
                command = os.read(wake, 1)
                if command in STEP:
                    row.step(STEP.index(command))
                elif command in RESET:
                    seed = None if shared.seeds[number] == NO_SEED else int(shared.seeds[number])
                    if seed is not None:
                        # Environments that draw from these are seeded, too: no other code runs in this process.
                        random.seed(seed)
                        np.random.seed(seed)
                    row.reset(seed=seed, side=RESET.index(command))
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
