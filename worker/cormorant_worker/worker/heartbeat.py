"""A worker's heartbeat: a few numbers in shared memory, which its fleet reads without asking."""

import os
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns

import numpy as np

from cormorant_worker import heartbeat_layout
from cormorant_worker.heartbeat_layout import FRAMES, PHASE, PID, SIZE_BYTES, TIMING
from cormorant_worker.spaces import Array
from cormorant_worker.wire import SharedMemory


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
    """[13] int64 in shared memory, as in `heartbeat_layout`. Written by one worker, read by its fleet."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._numbers: Array = np.frombuffer(memory.buffer, dtype=np.int64)
        self.frames: Array = self._numbers[FRAMES : FRAMES + 1]
        """[1] int64: frames landed, those of unfinished batches among them."""
        self.timing: Array = self._numbers[TIMING:]
        """[10] int64: the numbers of a `Timing`."""

    @classmethod
    def create(cls, path: Path | None = None) -> "Heartbeat":
        """Create a worker's heartbeat. `path`: a file for other processes of this machine; None: only through its
        descriptor.
        """
        return cls(SharedMemory.create(SIZE_BYTES, path=path))

    @classmethod
    def attach(cls, descriptor: int) -> "Heartbeat":
        return cls(SharedMemory(descriptor, SIZE_BYTES))

    def sign(self) -> None:
        self._numbers[PID] = os.getpid()

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it starts."""
        return int(self._numbers[PID])

    def enter(self, phase: Phase) -> None:
        self._numbers[PHASE] = phase

    @property
    def phase(self) -> Phase:
        return Phase(int(self._numbers[PHASE]))

    @property
    def spent_ns(self) -> tuple[int, ...]:
        """Nanoseconds by activity, up to now."""
        return heartbeat_layout.spent_ns(self.timing.tolist(), until_ns=monotonic_ns())

    def close(self) -> None:
        self.memory.close()
