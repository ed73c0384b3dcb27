"""What a fleet needs of an engine: a connection to each worker, memory for batches, and who makes both.

The fleet knows these protocols only. `local/` implements them with processes and shared memory of this machine, `ray/`
with actors and objects of a Ray cluster.
"""

from collections.abc import Sequence
from typing import Protocol

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import Request, Start, Ticket


class Source(Protocol):
    """What the fleet's thread waits on."""

    def fileno(self) -> int: ...


class Payload(Protocol):
    """Bytes that were laid out once for any number of workers (weights, states)."""

    size_bytes: int

    def close(self) -> None:
        """No worker will be sent it any more; those that have it keep it."""


class WorkerConnection(Protocol):
    """One worker attempt, as its fleet holds it.

    Everything but the last group is called with the fleet's condition held, and never waits, least of all for the
    worker. What ends a worker may take long and is called without the condition.
    """

    place: WorkerPlace

    @property
    def pid(self) -> int:
        """The worker's process id, on whichever machine; 0 while it is not known."""

    @property
    def phase(self) -> Phase:
        """What the worker does, as far as it is known here."""

    @property
    def frames(self) -> int:
        """Frames that the worker has stepped, as far as it is known here."""

    @property
    def spent_ns(self) -> tuple[int, ...]:
        """Nanoseconds by activity, as far as it is known here."""

    @property
    def is_open(self) -> bool:
        """False once nothing will come from the worker any more."""

    def sources(self) -> Sequence[Source]:
        """What the fleet's thread has to wait for, the same ones for all of the worker's life."""

    def receive(self, source: Source) -> Sequence[object]:
        """The worker's messages that have come by a source that is ready."""

    def send(self, message: object) -> None:
        """Send Begin, Reseed or Finish. As with all that is sent, a worker that is gone does not hear it, and what it
        does not take now is kept for `flush`.
        """

    def send_ticket(self, ticket: Ticket, memory: SharedMemory | None) -> None:
        """Have a batch collected; `memory` is that of a block which this worker does not know yet."""

    def request(self, request: Request, payload: Payload | None) -> None:
        """Have a request answered, with the bytes that belong to it. Never waits behind tickets."""

    def flush(self) -> Sequence[Source]:
        """Send what was kept, as far as the worker reads. Returns the sources that take no more now: call it again
        when they can be written.
        """

    def describe_doing(self) -> str:
        """What the worker does, in words, as far as it is known here: "stepping"."""

    # -- may take long ------------------------------------------------------------------------------------------

    def describe_end(self) -> str:
        """How the worker ended, as a clause: "was killed by SIGSEGV while building". Waits a moment for its end, which
        comes after that of its connection.
        """

    def kill(self) -> None:
        """End the worker at once. May be called twice, and from any thread."""

    def close(self) -> None:
        """Kill what is left and let go of everything."""


class BlockPool(Protocol):
    """The memory of batches, block by block: lent for a ticket, read by the consumer, given back."""

    limit: int
    """Blocks at most: those that workers fill, those that wait, those that consumers hold."""

    def resize(self, limit: int, *, at_least: int) -> None:
        """Change the limit, to less where there is no room for so many.

        Raises:
            FleetError: there is no room for `at_least`.
        """

    @property
    def room(self) -> int:
        """How many blocks can be lent now."""

    def lend(self, pid: int) -> tuple[int, SharedMemory | None]:
        """Take a block for a worker's ticket: its number, and its memory where the worker has to map it."""

    def give_back(self, block_index: int) -> None:
        """The block's batch is not needed any more."""

    def forget(self, pid: int) -> None: ...

    def block(self, block_index: int) -> Block:
        """The arrays of a batch that has landed."""

    def memory(self, block_index: int) -> SharedMemory | None:
        """What the block lies in from its first byte on; None where that is no shared memory of this machine."""

    def close(self) -> None:
        """Let go of all memory. Views of blocks stay valid."""


class Engine(Protocol):
    """Starts workers and keeps what they fill."""

    descriptors_each: int
    """File descriptors that a worker takes in this process."""

    def complete(self, job: CollectorJob, options: FleetOptions) -> FleetOptions:
        """Options with what this engine alone knows: how many workers there are unless told, and who brings slots.

        Raises:
            DeviceUnavailable: workers cannot have a device that the job or the options name, as far as it is known
                before any starts.
        """

    def start(self, start: Start) -> WorkerConnection:
        """Start a worker, which will say `Ready` or `Failed`; it is not waited for. May take long, is called without
        the fleet's condition, and by several threads at once.
        """

    def device_of(self, device: str, number: int) -> str:
        """The device of the n-th worker that asks for `device`: "cuda" is any of the visible ones."""

    def cpus_for(self, num_workers: int) -> int:
        """Processors that each of so many workers may use; 0: the worker finds out where it runs."""

    def make_blocks(self, layout: Layout, limit: int) -> BlockPool:
        """Lay out the memory of batches. Called once, when the first worker has told the layout, without the condition:
        it may take long.

        Raises:
            FleetError: not even one batch fits.
        """

    def share(self, data: bytes | memoryview | SharedMemory) -> Payload:
        """Lay bytes out for any number of workers. May take long: the memory that it needs may not be there. `data`:
        bytes are copied. Shared memory is handed on as it is where workers can map it, and has to stay open until the
        payload is closed.
        """

    def close(self) -> None:
        """Let go of everything, after the last worker was closed."""
