"""The engine of one machine: worker processes behind two sockets each, batches in shared memory."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.place import WorkerPlace, find_device
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.envs.kinds import imports_of
from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.options import FleetOptions, default_workers
from cormorant_worker.fleet.transport import Payload
from cormorant_worker.fork_server import WORKERS, ForkServer, Imports, fork_server
from cormorant_worker.wire import MessageSocket, SharedMemory
from cormorant_worker.worker.heartbeat import Heartbeat, Phase
from cormorant_worker.worker.messages import Request, Start

_KILL_S = 10.0
"""In an uninterruptible system call even SIGKILL waits: then it is left to the kernel."""
_MOST_MESSAGES = 64
"""Read at once: a worker that says much does not keep the fleet from the others."""


class WorkerProcess:
    """A worker and the two sockets to it: the `WorkerConnection` of the local engine."""

    def __init__(self, place: WorkerPlace, fork_server: ForkServer, imports: Imports) -> None:
        """Have the process forked. It waits for `Start` on `data`."""
        self.place = place
        self.is_open = True
        self.data, theirs_data = _pair()
        self.control, theirs_control = _pair()
        self.heartbeat = Heartbeat.create()
        self._fork_server = fork_server
        self._is_closed = False
        handed = (theirs_data.fileno(), theirs_control.fileno(), self.heartbeat.memory.descriptor)
        self._number = fork_server.fork(place.attempt_name, handed, imports=imports)
        theirs_data.close()
        theirs_control.close()

    @property
    def pid(self) -> int:
        return self.heartbeat.pid

    @property
    def phase(self) -> Phase:
        return self.heartbeat.phase

    @property
    def frames(self) -> int:
        return int(self.heartbeat.frames[0])

    @property
    def spent_ns(self) -> tuple[int, ...]:
        return self.heartbeat.spent_ns

    def describe_doing(self) -> str:
        return self.phase.name.lower()

    def sources(self) -> Sequence[MessageSocket]:
        return (self.control, self.data)

    def receive(self, source: object) -> Sequence[object]:
        # The end of the data socket is the worker's end.
        if not self.is_open:
            return ()
        if source is self.control:
            return _whole_messages(self.control)[0]
        messages, is_at_end = _whole_messages(self.data)
        if is_at_end:
            messages += _whole_messages(self.control)[0]  # what it said before it ended
            self.is_open = False
        return messages

    def flush(self) -> Sequence[MessageSocket]:
        unsent = [channel for channel in (self.control, self.data) if channel.has_unsent] if self.is_open else []
        for channel in unsent:
            with suppress(OSError):  # that the worker is gone shows at its data socket
                channel.flush()
        return [channel for channel in unsent if channel.has_unsent]

    def send(self, message: object, memory: SharedMemory | None = None) -> None:
        with suppress(OSError):  # as in `flush`
            self.data.send(message, *([] if memory is None else [memory.descriptor]))

    def ask(self, request: Request, payload: Payload | None) -> None:
        assert payload is None or isinstance(payload, SharedMemory), payload
        with suppress(OSError):  # as in `flush`
            self.control.send(request, *([] if payload is None else [payload.descriptor]))

    def describe_end(self) -> str:
        how = self._fork_server.describe_end(self._number) if self.pid else "closed its connection"
        return f"{how} while {self.phase.name.lower()}"

    def kill(self) -> None:
        if self._is_closed:
            return
        self._fork_server.kill(self._number)
        if self.pid:  # else it is not forked yet
            self._fork_server.wait(self._number, _KILL_S)

    def close(self) -> None:
        self.is_open = False
        self.kill()
        self._is_closed = True
        self.data.close()
        self.control.close()
        self.heartbeat.close()


def _pair() -> tuple[MessageSocket, socket.socket]:
    """The fleet's end, which never waits for the worker, and the worker's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return MessageSocket(ours), theirs


def _whole_messages(channel: MessageSocket) -> tuple[list[object], bool]:
    """Messages that arrived whole, a bounded number of them; and whether the other end is gone."""
    messages: list[object] = []
    try:
        while len(messages) < _MOST_MESSAGES:
            messages.append(channel.receive()[0])
    except BlockingIOError:
        return messages, False
    except OSError:
        return messages, True
    return messages, False


class SharedBlockPool:
    """At most `limit` blocks, created when first needed and reused last in, first out. Owned by one thread."""

    def __init__(self, layout: Layout, limit: int) -> None:
        self.layout = layout
        self.limit = limit
        self._blocks: list[tuple[Block, SharedMemory]] = []
        self._free: list[int] = []

    def resize(self, limit: int, *, at_least: int) -> None:
        self.limit = limit  # memory is made when it is needed; the system refuses what it does not have

    @property
    def room(self) -> int:
        return len(self._free) + max(0, self.limit - len(self._blocks))

    def lend(self) -> int:
        if self._free:
            return self._free.pop()
        if len(self._blocks) >= self.limit:
            raise FleetError(f"all {self.limit} batch slots are in use")
        memory = SharedMemory.create(self.layout.size_bytes)
        self._blocks.append((Block(self.layout, memory.buffer), memory))
        return len(self._blocks) - 1

    def give_back(self, block_index: int) -> None:
        self._free.append(block_index)

    def block(self, block_index: int) -> Block:
        return self._blocks[block_index][0]

    def memory(self, block_index: int) -> SharedMemory:
        return self._blocks[block_index][1]

    def close(self) -> None:
        for _, memory in self._blocks:
            memory.close()


class LocalEngine:
    """Forks worker processes and owns the shared memory that they fill."""

    descriptors_each = 9
    """2 sockets, 2 for its heartbeat, 4 for two batches, 1 spare."""

    def complete(self, job: CollectorJob, options: FleetOptions) -> FleetOptions:
        fork_server(WORKERS)  # what workers import is imported from now on
        if options.device:
            find_device(options.device)
        elif any(group.device == "gpu" for group in job.spec.worker_groups):
            find_device("cuda")
        return replace(options, workers=options.workers or default_workers(job))

    def start(self, start: Start) -> WorkerProcess:
        spec = start.job.spec
        imports = Imports(
            now=imports_of(spec.env),
            # Two seconds, and only policies that are TensorDictModules need it.
            when_idle=("tensordict.nn",) if spec.policy.entrypoint or start.overrides else (),
        )
        process = WorkerProcess(start.place, fork_server(WORKERS), imports)
        process.send(start)
        return process

    def device_of(self, device: str, number: int) -> str:
        count = torch.cuda.device_count() if device == "cuda" else 0
        return f"{device}:{number % count}" if count > 1 else device

    def cpus_for(self, num_workers: int) -> int:
        return max(1, available_cpus() // num_workers)

    def make_blocks(self, layout: Layout, limit: int) -> SharedBlockPool:
        return SharedBlockPool(layout, limit)

    def share(self, data: bytes | memoryview | SharedMemory) -> SharedMemory:
        if isinstance(data, SharedMemory):
            return data
        memory = SharedMemory.create(max(1, len(data)))
        memory.buffer[: len(data)] = data
        return memory

    def close(self) -> None:
        """Has no effect: workers are closed separately, and the fork server serves the next fleet."""
