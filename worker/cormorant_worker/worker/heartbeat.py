"""A worker's heartbeat: int64 numbers in shared memory, which its fleet reads without asking.

    frames landed | phase | process id | nanoseconds by activity .. | the activity that goes on | since when

The last ones are those of a `Timing`.
"""

import os
from enum import IntEnum
from time import monotonic_ns

import numpy as np

from cormorant_worker.collect.timing import NUM_TIMING, spent_ns
from cormorant_worker.spaces import Array
from cormorant_worker.wire import SharedMemory

_FRAMES, _PHASE, _PID, _TIMING = range(4)
_SIZE_BYTES = 8 * (_TIMING + NUM_TIMING)


class Phase(IntEnum):
    """Activity of a worker's main thread.

    IMPORTING -> BUILDING -> WAITING <-> STEPPING -> STORING -> WAITING
                                STEPPING <-> ASKING
    """

    IMPORTING = 0
    BUILDING = 1
    WAITING = 2
    """For a ticket: nothing to do."""
    STEPPING = 3
    STORING = 4
    ASKING = 5
    """Looking for an inference server, because its own is gone or does not answer."""


class Heartbeat:
    """Written by one worker, read by its fleet."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._numbers: Array = np.frombuffer(memory.buffer, dtype=np.int64)
        self.frames: Array = self._numbers[_FRAMES : _FRAMES + 1]
        """[1] int64: frames landed, those of unfinished batches among them."""
        self.timing: Array = self._numbers[_TIMING:]
        """[NUM_TIMING] int64."""

    @classmethod
    def create(cls) -> "Heartbeat":
        return cls(SharedMemory.create(_SIZE_BYTES))

    @classmethod
    def attach(cls, descriptor: int) -> "Heartbeat":
        return cls(SharedMemory(descriptor, _SIZE_BYTES))

    def sign(self) -> None:
        self._numbers[_PID] = os.getpid()

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it starts."""
        return int(self._numbers[_PID])

    def enter(self, phase: Phase) -> None:
        self._numbers[_PHASE] = phase

    @property
    def phase(self) -> Phase:
        return Phase(int(self._numbers[_PHASE]))

    @property
    def spent_ns(self) -> tuple[int, ...]:
        """Nanoseconds by activity, up to now."""
        return spent_ns(self.timing.tolist(), until_ns=monotonic_ns())

    def close(self) -> None:
        self.memory.close()
