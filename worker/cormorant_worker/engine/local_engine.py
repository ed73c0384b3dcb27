"""The engine of one machine: worker processes, batches in shared memory."""

import threading
from collections.abc import Callable

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Layout
from cormorant_worker.collect.place import find_device
from cormorant_worker.engine.descriptors import make_room
from cormorant_worker.engine.link import Link, LinkClosed
from cormorant_worker.engine.messages import Start
from cormorant_worker.engine.nursery import Imports, Nursery, borrow, give_back
from cormorant_worker.engine.process import SharedPayload, WorkerProcess
from cormorant_worker.engine.slots import SlotPool
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.shared_memory import SharedMemory

_DESCRIPTORS = 9
"""Of a worker in this process: 2 sockets, 2 of its pulse, 4 of the two batches that it may fill, 1 to spare."""


class LocalEngine:
    """Has worker processes forked and owns the shared memory that they fill."""

    def __init__(self) -> None:
        self._nurseries: list[Nursery] = []
        """Borrowed ones; the newest forks."""
        self._borrowing = threading.Lock()
        """Guards `_nurseries`: workers are started by several threads."""

    def check_devices(self, job: CollectorJob, device: str) -> None:
        """Workers have this machine's devices.

        Raises:
            DeviceUnavailable: it lacks what the options or the gpu groups ask for.
        """
        if device:
            find_device(device)
        elif any(group.device == "gpu" for group in job.spec.worker_groups):
            find_device("cuda")

    def open(self, wake: Callable[[Link], None]) -> None:
        """Workers have sockets that the fleet's thread waits on. What they import is imported from now on."""
        self._nursery()

    def make_room_for(self, num_workers: int) -> None:
        """Two sockets, a pulse and two batches each.

        Raises:
            FleetError: this process may not open so many files.
        """
        make_room(num_workers, each=_DESCRIPTORS)

    def start(self, start: Start) -> WorkerProcess:
        """Have a process forked and tell it what to build."""
        process = WorkerProcess(start.place, self._nursery(), _imports_of(start))
        try:
            process.send(start)
        except LinkClosed:
            return process  # it died already: the end of its socket tells the fleet
        return process

    def cpus_for(self, num_workers: int) -> int:
        """Workers share this process's processors."""
        return max(1, available_cpus() // num_workers)

    def make_store(self, layout: Layout, limit: int) -> SlotPool:
        """Shared memory, mapped by every worker that fills it."""
        return SlotPool(layout, limit)

    def share(self, data: bytes | SharedMemory) -> SharedPayload:
        """Shared memory, whose descriptor workers get."""
        if isinstance(data, SharedMemory):
            return SharedPayload(data, is_borrowed=True)
        memory = SharedMemory.create(max(1, len(data)))
        memory.buffer[: len(data)] = data
        return SharedPayload(memory, is_borrowed=False)

    def close(self) -> None:
        """Workers and slots were closed one by one; what forked them may go."""
        for nursery in self._nurseries:
            give_back(nursery)
        self._nurseries.clear()

    def _nursery(self) -> Nursery:
        with self._borrowing:
            if not self._nurseries or not self._nurseries[-1].is_alive:
                self._nurseries.append(borrow())
            return self._nurseries[-1]


def _imports_of(start: Start) -> Imports:
    spec = start.job.spec
    return Imports(
        now=("envpool",) if spec.env.envpool is not None else (),
        # Two seconds, and only policies that are TensorDictModules need it.
        when_idle=("tensordict.nn",) if spec.policy.entrypoint or start.parts else (),
    )
