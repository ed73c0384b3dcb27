"""What a worker is doing right now, readable by its fleet without asking: three numbers in shared memory."""

import os
from enum import IntEnum

import numpy as np

from cormorant_worker.engine.shared_memory import SharedMemory
from cormorant_worker.spaces import Array

_SIZE_BYTES = 24


class Phase(IntEnum):
    """What the main thread of a worker is doing.

    IMPORTING -> BUILDING -> WAITING <-> STEPPING -> STORING -> WAITING
    """

    IMPORTING = 0
    BUILDING = 1
    WAITING = 2
    """For a ticket: nothing to do."""
    STEPPING = 3
    STORING = 4


class Pulse:
    """[3] int64 in shared memory: frames landed so far, phase, process id. Written by one worker, read by its fleet."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._numbers: Array = np.frombuffer(memory.buffer, dtype=np.int64)
        self.frames: Array = self._numbers[:1]
        """[1] int64: frames landed, those of unfinished batches among them."""

    @classmethod
    def create(cls) -> "Pulse":
        """Make a pulse for a new worker."""
        return cls(SharedMemory.create(_SIZE_BYTES))

    @classmethod
    def attach(cls, descriptor: int) -> "Pulse":
        """Map the pulse that the fleet made."""
        return cls(SharedMemory(descriptor, _SIZE_BYTES))

    def sign(self) -> None:
        """Say which process this worker is."""
        self._numbers[2] = os.getpid()

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it is born."""
        return int(self._numbers[2])

    def enter(self, phase: Phase) -> None:
        """Say what begins."""
        self._numbers[1] = phase

    @property
    def phase(self) -> Phase:
        """What the worker does."""
        return Phase(int(self._numbers[1]))

    def close(self) -> None:
        """Let go of the descriptor."""
        self.memory.close()
