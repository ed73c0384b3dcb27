"""Protocols that an engine implements for a fleet: a connection to each worker, memory for batches, and their
factories.

The fleet uses only these protocols. `local/` implements them with processes and shared memory of this machine, `ray/`
with actors and objects of a Ray cluster.
"""

from collections.abc import Sequence
from typing import Protocol

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.wire import SharedMemory
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import Request, Start


class Source(Protocol):
    """An event source of the fleet's thread."""

    def fileno(self) -> int: ...


Payload = object
"""Bytes that an engine shares with any number of workers (weights, states), for as long as something refers to them."""


class WorkerConnection(Protocol):
    """The fleet's connection to one worker attempt. Methods are called with the fleet's condition held and never wait,
    except the last group, which is called without it.
    """

    place: WorkerPlace

    @property
    def pid(self) -> int:
        """The worker's process id on its machine; 0 while unknown."""

    @property
    def phase(self) -> Phase:
        """The worker's phase, as far as known here."""

    @property
    def frames(self) -> int:
        """Frames that the worker has stepped, as far as known here."""

    @property
    def spent_ns(self) -> tuple[int, ...]:
        """Nanoseconds by activity, as far as known here."""

    @property
    def is_open(self) -> bool:
        """False once the worker will send nothing more."""

    def sources(self) -> Sequence[Source]:
        """Event sources of this worker, constant for its lifetime."""

    def receive(self, source: Source) -> Sequence[object]:
        """Messages that have arrived at a ready source."""

    def send(self, message: object, memory: SharedMemory | None = None) -> None:
        """Send a message that is not a request, unless the worker is gone. Unsent bytes wait for `flush`. `memory`: of
        a ticket's block.
        """

    def ask(self, request: Request, payload: Payload | None) -> None:
        """Send a request and its bytes as `send` does; it never waits behind other messages."""

    def flush(self) -> Sequence[Source]:
        """Send pending bytes. Returns the sources that accept no more now: call it again when they are writable."""

    def describe_doing(self) -> str:
        """The worker's activity in words, as far as known here: "stepping"."""

    # -- may take long ------------------------------------------------------------------------------------------

    def describe_end(self) -> str:
        """How it ended: "was killed by SIGSEGV while building". Waits briefly for the end after the connection's."""

    def kill(self) -> None:
        """End the worker at once. May be called twice, and from any thread."""

    def close(self) -> None:
        """Kill the process and release everything."""


class BlockPool(Protocol):
    """The memory of batches in blocks: lent for a ticket, read by the consumer, returned."""

    limit: int
    """Maximum number of blocks, counting those that workers fill, that wait, and that consumers hold."""

    def resize(self, limit: int, *, at_least: int) -> None:
        """Change the limit, to less if there is not enough room. Raises FleetError if there is none for `at_least`."""

    @property
    def room(self) -> int:
        """Number of blocks that can be lent now."""

    def lend(self) -> int:
        """Lend a block for a worker's ticket. Returns its number."""

    def give_back(self, block_index: int) -> None:
        """Return a block whose batch is no longer needed."""

    def block(self, block_index: int) -> Block:
        """The arrays of a batch that has landed."""

    def memory(self, block_index: int) -> SharedMemory | None:
        """Shared memory that begins with a lent block; None if it is not shared memory of this machine."""

    def close(self) -> None:
        """Release all memory. Views of blocks stay valid."""


class Engine(Protocol):
    descriptors_each: int
    """Number of file descriptors per worker in this process."""

    def complete(self, job: CollectorJob, options: FleetOptions) -> FleetOptions:
        """Fill in the number of workers, and who provides slots. Raises DeviceUnavailable where it is known."""

    def start(self, start: Start) -> WorkerConnection:
        """Start a worker, which will report `Ready` or `Failed`. May take long: called without the condition, by
        threads.
        """

    def device_of(self, device: str, number: int) -> str:
        """The device of the n-th worker that asks for `device`: "cuda" is any of the visible ones."""

    def cpus_for(self, num_workers: int) -> int:
        """Number of processors for each of so many workers; 0: the worker determines it."""

    def make_blocks(self, layout: Layout, limit: int) -> BlockPool:
        """Allocate the memory of batches, once, without the condition: it may take long. Raises FleetError."""

    def share(self, data: bytes | memoryview | SharedMemory) -> Payload:
        """Share bytes with any number of workers; shared memory is copied only if they cannot map it. May take long."""

    def close(self) -> None:
        """Release everything, after the last worker was closed."""
