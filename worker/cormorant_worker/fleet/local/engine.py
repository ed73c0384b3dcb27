"""The engine of one machine: worker processes, batches in shared memory."""

import socket
from collections.abc import Callable
from dataclasses import replace

import torch

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Layout
from cormorant_worker.collect.place import find_device, spread
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.fleet.local.block_pool import SharedBlockPool
from cormorant_worker.fleet.local.process import SharedPayload, WorkerProcess
from cormorant_worker.fleet.options import FleetOptions, default_workers
from cormorant_worker.fleet.transport import WorkerConnection
from cormorant_worker.fork_server import WORKERS, Imports, fork_server
from cormorant_worker.inference.handshake import listen
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.worker.messages import Start


class LocalEngine:
    """Has worker processes forked and owns the shared memory that they fill."""

    descriptors_each = 9
    """2 sockets, 2 for its heartbeat, 4 for two batches, 1 spare."""

    def check_devices(self, job: CollectorJob, device: str) -> None:
        if device:
            find_device(device)
        elif any(group.device == "gpu" for group in job.spec.worker_groups):
            find_device("cuda")

    def complete(self, job: CollectorJob, options: FleetOptions) -> FleetOptions:
        return replace(options, workers=options.workers or default_workers(job))

    def open(self, wake: Callable[[WorkerConnection], None]) -> None:
        fork_server(WORKERS)  # what workers import is imported from now on

    def start(self, start: Start, listener: socket.socket | None = None) -> WorkerProcess:
        process = WorkerProcess(start.place, fork_server(WORKERS), _imports_of(start))
        process.send(start, *([] if listener is None else [listener.fileno()]))
        return process

    def listen(self) -> socket.socket:
        return listen()

    def device_of(self, device: str, number: int) -> str:
        return spread(device, number, num_devices=torch.cuda.device_count() if device == "cuda" else 0)

    def cpus_for(self, num_workers: int) -> int:
        return max(1, available_cpus() // num_workers)

    def make_blocks(self, layout: Layout, limit: int) -> SharedBlockPool:
        return SharedBlockPool(layout, limit)

    def share(self, data: bytes | memoryview | SharedMemory) -> SharedPayload:
        if isinstance(data, SharedMemory):
            return SharedPayload(data, is_borrowed=True)
        memory = SharedMemory.create(max(1, len(data)))
        memory.buffer[: len(data)] = data
        return SharedPayload(memory, is_borrowed=False)

    def close(self) -> None:
        """Nothing is left: workers are closed one by one, and the fork server serves the next fleet."""


def _imports_of(start: Start) -> Imports:
    spec = start.job.spec
    return Imports(
        now=("envpool",) if spec.env.envpool is not None else (),
        # Two seconds, and only policies that are TensorDictModules need it.
        when_idle=("tensordict.nn",) if spec.policy.entrypoint or start.overrides else (),
    )
