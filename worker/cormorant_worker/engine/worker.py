"""A worker process: builds one collector and fills the slots that its fleet's tickets name.

Started as `python -m cormorant_worker.engine.worker DATA CONTROL PULSE` with three inherited descriptors. The main
thread steps; a second one answers control requests. When the fleet's process ends, however it ends, the control
socket closes and this process ends too.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import MutableMapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch

from cormorant_worker.block import Block, Layout
from cormorant_worker.build import Built, build_collector
from cormorant_worker.collector import Collector
from cormorant_worker.engine.messages import (
    Applied,
    Begin,
    Failed,
    Finish,
    Finished,
    Logged,
    Ready,
    Reply,
    Request,
    Sealed,
    Start,
    Ticket,
)
from cormorant_worker.engine.pulse import Phase, Pulse
from cormorant_worker.engine.shared_memory import SharedMemory
from cormorant_worker.errors import (
    CormorantError,
    EnvCrashed,
    StateError,
)
from cormorant_worker.gate import Stopped
from cormorant_worker.weights import RANDOM_VERSION, PolicyVersion
from cormorant_worker.weights_file import from_bytes

if TYPE_CHECKING:
    from cormorant_worker.sinks.protocol import Sink

_OFFER_TIMEOUT_S = 30.0
"""For weights that were offered before a ticket was handed out: they come on the other socket, within milliseconds."""
_IDLE_S = 5.0
"""Without a ticket, after which the open shard is sealed."""
_HELD_TIMEOUT_S = 600.0
"""A pause is answered once the vector step under way has landed; the environments' own limits end it sooner."""


class Worker:
    """One collector, its slots and its sink. The main thread runs it; `Control` answers requests beside it."""

    def __init__(self, data: "DataChannel", pulse: Pulse) -> None:
        self._data = data
        self._pulse = pulse
        self._slots: dict[int, Block] = {}
        self._sink: Sink | None = None
        self.is_built = False
        """There is a collector."""
        self.serving = threading.Event()
        """Everything is open: tickets and requests can be answered."""
        self.boundary = threading.Lock()
        """Held by the main thread while it fills a block: who has it sees the collector between two batches."""

    def run(self, control: Connection) -> None:
        """Build, report, and fill slots until told to finish."""
        # From the first moment on: it ends this process when the fleet is gone, even in an environment's constructor.
        self.control = Control(control, self)
        self.control.start()
        start = self._data.recv()
        assert isinstance(start, Start), start
        self._pulse.enter(Phase.BUILDING)
        built = build_collector(start.job, start.place)
        self.collector: Collector = built.collector
        self.is_built = True
        self.collector.pulse = self._pulse.frames
        self._layout = self.collector.layout(start.num_rows)
        self._data.send(self._ready(built))
        begin = self._data.recv()
        if isinstance(begin, Finish):
            self._finish()
            return
        assert isinstance(begin, Begin), begin
        if begin.dataset_uri:
            self._sink = _open_sink(begin.dataset_uri, start, self.collector, self._layout)
        self.serving.set()
        self._serve()

    def _ready(self, built: Built) -> Ready:
        observation, action = self.collector.spaces
        return Ready(
            layout=self._layout,
            observation_space=observation,
            action_space=action,
            specs=self.collector.weights.specs,
            num_threads=built.num_threads,
        )

    def _serve(self) -> None:
        while True:
            self._pulse.enter(Phase.WAITING)
            if self._sink is not None and not self._data.has_message(_IDLE_S):
                self._sink.flush()  # nothing to do for a while: what was appended need not wait for a full shard
            message = self._data.recv()
            if isinstance(message, Finish):
                self._finish()
                return
            try:
                self._fill(message)
            except Stopped:
                self._finish()
                return

    def _fill(self, ticket: Ticket) -> None:
        """Collect one ticket's batch.

        Raises:
            Stopped: the fleet gave the batch up.
        """
        if ticket.slot_is_new:
            memory = SharedMemory(self._data.recv_descriptor(), self._layout.size_bytes)
            self._slots[ticket.slot] = Block(self._layout, memory.buffer)
            memory.close()
        block = self._slots[ticket.slot]
        version = PolicyVersion(ticket.version)
        self.collector.weights.wait_until_offered(version, _OFFER_TIMEOUT_S)
        with self.boundary:
            self.apply_weights()
            self._pulse.enter(Phase.STEPPING)
            filled = self.collector.fill(block, ticket.num_frames)
            if self._sink is not None:
                self._pulse.enter(Phase.STORING)
                self._sink.append(block)
        self._data.send(
            Sealed(
                number=ticket.number,
                slot=ticket.slot,
                num_frames=filled.num_frames,
                num_rows=block.num_rows,
                num_ends=block.num_ends,
                min_version=_oldest_version(block),
                returns=tuple(filled.episodes.returns),
                lengths=tuple(filled.episodes.lengths),
                durable_frames=self._sink.durable_frames if self._sink is not None else 0,
                env_restarts=self.collector.env_restarts,
            )
        )

    def apply_weights(self) -> None:
        """Let the newest staged weights act, and say so. The caller holds `boundary`."""
        before = self.collector.weights.version
        version = self.collector.weights.apply()
        if version != before:
            self.control.send(Applied(version=version))

    def _finish(self) -> None:
        self._pulse.enter(Phase.STORING)
        durable = 0
        if self._sink is not None:
            self._sink.close()
            durable = self._sink.durable_frames
        self.collector.close()
        self._data.send(Finished(durable_frames=durable))


class Control(threading.Thread):
    """Answers the fleet's requests while the main thread steps."""

    def __init__(self, connection: Connection, worker: Worker) -> None:
        super().__init__(name="control", daemon=True)
        self._connection = connection
        self._worker = worker
        self._sending = threading.Lock()
        """Guards writes to the connection: both threads report here."""

    def send(self, message: Applied | Reply) -> None:
        """Report to the fleet. Called by both threads."""
        with self._sending:
            self._connection.send(message)

    def run(self) -> None:
        """Serve requests until the fleet is gone; then end the process at once, whatever it is doing."""
        try:
            while True:
                self.send(self._reply(self._connection.recv()))
        except (EOFError, OSError):
            os._exit(1)

    def _reply(self, request: Request) -> Reply:
        try:
            return Reply(number=request.number, state=self._answer(request))
        except CormorantError as error:
            return Reply(number=request.number, error=str(error))
        except Exception as error:  # noqa: BLE001  # an environment's own get_state and set_state may raise anything
            return Reply(number=request.number, error=f"{type(error).__name__}: {error}")

    def _answer(self, request: Request) -> bytes:
        if request.action != "stop":
            self._worker.serving.wait()  # bounded by the fleet's limit on starting
        state = _shared_bytes(self._connection, request) if request.size_bytes else b""
        match request.action:
            case "offer":
                self._offer(state, PolicyVersion(request.version))
            case "pause":
                self._pause()
            case "resume":
                self._worker.collector.gate.open()
            case "stop":
                if not self._worker.is_built:
                    os._exit(0)
                self._worker.collector.gate.stop()
            case "save":
                return self._between_batches(lambda collector: collector.state())
            case "restore":
                self._between_batches(lambda collector: collector.restore(state))
        return b""

    def _offer(self, weights: bytes, version: PolicyVersion) -> None:
        self._worker.collector.weights.offer(from_bytes(weights), version=version)
        # A worker that is waiting for a ticket need not wait for it to let new weights act.
        if self._worker.boundary.acquire(blocking=False):
            try:
                self._worker.apply_weights()
            finally:
                self._worker.boundary.release()

    def _pause(self) -> None:
        gate = self._worker.collector.gate
        gate.shut()
        while self._worker.boundary.locked() and not gate.wait_until_held(0.005):
            pass  # bounded by the environments' time limits; the fleet's own limit names this worker sooner

    def _between_batches(self, action: Any) -> bytes:
        if not self._worker.boundary.acquire(timeout=_HELD_TIMEOUT_S):
            raise StateError(f"the batch under way did not end within {_HELD_TIMEOUT_S:.0f} s")
        try:
            result = action(self._worker.collector)
        finally:
            self._worker.boundary.release()
        return result or b""


def _shared_bytes(connection: Connection, request: Request) -> bytes:
    """Copy the bytes that a request brought as a descriptor."""
    memory = SharedMemory(recv_handle(connection), request.size_bytes)
    data = bytes(memory.buffer)
    memory.close()
    return data


def _oldest_version(block: Block) -> int:
    versions = block.policy_version[: block.num_rows]
    if not block.is_full:
        versions = versions[np.arange(block.num_rows)[:, None] < block.lengths[None, :]]
    acted = versions[versions != RANDOM_VERSION]
    return int(acted.min()) if acted.size else int(RANDOM_VERSION)


def _open_sink(uri: str, start: Start, collector: Collector, layout: Layout) -> "Sink":
    # Imported by those who have a dataset: pyarrow takes a while to load.
    from cormorant_worker.engine.store import describe_job
    from cormorant_worker.sinks.dataset import open_dataset

    observation, action = collector.spaces
    dataset = open_dataset(uri, describe_job(start.job, layout, observation, action))
    return dataset.writer(part=start.place.part, layout=layout)


class DataChannel:
    """The data socket; both threads log through it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        """Guards writes to the connection."""

    def send(self, message: object) -> None:
        """Report to the fleet. Called by both threads."""
        with self._sending:
            self._connection.send(message)

    def recv(self) -> Any:
        """Wait for the fleet's next message: for as long as the fleet lives. Called by the main thread."""
        return self._connection.recv()

    def has_message(self, timeout_s: float) -> bool:
        """Wait for the fleet's next message, at most `timeout_s`. Called by the main thread."""
        return self._connection.poll(timeout_s)

    def recv_descriptor(self) -> int:
        """Take the descriptor that follows the last message."""
        return recv_handle(self._connection)


def _forward_logs(data: DataChannel) -> None:
    """Log events travel to the fleet, which knows where the user reads them."""

    def forward(_: object, level: str, event: MutableMapping[str, Any]) -> str:
        fields = {key: value for key, value in event.items() if key != "event"}
        data.send(Logged(level=level, event=str(event.get("event", "")), fields=fields))
        raise structlog.DropEvent

    structlog.configure(processors=[forward])


def _failure(error: Exception) -> Failed:
    known = isinstance(error, CormorantError)
    final = known and not isinstance(error, EnvCrashed)
    return Failed(
        kind=type(error).__name__,
        message=str(error) if known else f"{type(error).__name__}: {error}",
        traceback=traceback.format_exc(),
        is_final=final,
    )


def main() -> int:
    """Run one worker; exit code 0 when it finished, 1 when it failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the fleet's: it drains its workers
    data, control = DataChannel(Connection(int(sys.argv[1]))), Connection(int(sys.argv[2]))
    pulse = Pulse.attach(int(sys.argv[3]))
    torch.set_num_threads(1)
    _forward_logs(data)
    worker = Worker(data, pulse)
    try:
        worker.run(control)
    except Stopped:
        return 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # the fleet is gone
    except Exception as error:  # noqa: BLE001  # the process's edge: whatever it was, the fleet is told with its traceback
        data.send(_failure(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # EnvPool's threads and gymnasium's atexit handlers have nothing left to do
