"""A worker process: a runtime behind two sockets, filling blocks of shared memory.
`python -m cormorant_worker.fleet.local.worker_main SOCKET` is the fork server of such processes.

The main thread steps; a second one answers control requests. When the fleet's process ends, however it ends, the
control socket closes and this process ends too.
"""

import os
import signal
import socket
import threading
from typing import Any

import torch

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.pause_gate import Stopped
from cormorant_worker.fork_server import run
from cormorant_worker.inference.connections import listen
from cormorant_worker.wire import MessageSocket, PeerGone, SharedMemory
from cormorant_worker.worker.heartbeat import Heartbeat
from cormorant_worker.worker.messages import Applied, Reply, Start, Ticket
from cormorant_worker.worker.runtime import Runtime, WorkerRuntime, describe_failure, forward_logs
from cormorant_worker.worker.serving import ServerRuntime


class SocketUplink:
    """The data and the control socket. Both threads report through it."""

    def __init__(self, data: MessageSocket, control: MessageSocket) -> None:
        self._data = data
        self._control = control
        self._sending_data = threading.Lock()
        self._sending_control = threading.Lock()
        self._slots: dict[int, Block] = {}
        self.descriptors: tuple[int, ...] = ()
        """That came with the newest message of `recv`."""

    def send(self, message: object) -> None:
        if isinstance(message, Applied | Reply):
            with self._sending_control:
                self._control.send(message)
        else:
            with self._sending_data:
                self._data.send(message)

    def recv(self) -> Any:
        """Wait for the fleet's next message on the data socket: for as long as the fleet lives."""
        message, self.descriptors = self._data.receive()
        return message

    def fileno(self) -> int:
        return self._data.fileno()

    def has_message(self, timeout_s: float) -> bool:
        return self._data.wait(timeout_s)

    def block(self, ticket: Ticket, layout: Layout) -> Block:
        """The ticket's block, whose descriptor came with the ticket."""
        if ticket.block_index in self._slots:
            os.close(self.descriptors[0])  # it is mapped already
        else:
            memory = SharedMemory(self.descriptors[0], layout.size_bytes)
            self._slots[ticket.block_index] = Block(layout, memory.buffer)
        return self._slots[ticket.block_index]


def _answer_requests(control: MessageSocket, uplink: SocketUplink, runtime: Runtime) -> None:
    """Answer until the fleet is gone; then end the process at once, whatever it is doing."""
    try:
        while True:
            request, descriptors = control.receive()
            payload = memoryview(b"")
            if descriptors:
                payload = SharedMemory(descriptors[0], os.fstat(descriptors[0]).st_size).buffer
            uplink.send(runtime.answer(request, payload))
    except OSError:
        os._exit(1)


def run_worker(data_socket: int, control_socket: int, heartbeat_memory: int) -> int:
    """Run a worker until its end, in its own process. Takes descriptors: of the socket for Start, tickets and their
    results, of that for requests, and of the Heartbeat's memory. Returns the exit code.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the fleet's: it drains its workers
    data, control = (MessageSocket(socket.socket(fileno=one)) for one in (data_socket, control_socket))
    heartbeat = Heartbeat.attach(heartbeat_memory)
    heartbeat.sign()
    torch.set_num_threads(1)
    uplink = SocketUplink(data, control)
    forward_logs(uplink)
    runtime: Runtime = WorkerRuntime(uplink, heartbeat)
    try:
        start = uplink.recv()
        assert isinstance(start, Start), start
        if start.place.is_server:
            runtime = ServerRuntime(uplink, heartbeat, listen())
        # From here on: it ends this process when the fleet is gone, even in an environment's constructor.
        answering = threading.Thread(
            target=_answer_requests, args=(control, uplink, runtime), name="control", daemon=True
        )
        answering.start()
        runtime.run(start)
    except Stopped:
        return 0
    except PeerGone:
        return 1  # the fleet is gone
    except Exception as error:  # noqa: BLE001  # the process's edge: whatever it was, the fleet is told with its traceback
        uplink.send(describe_failure(error, acts_as_published=runtime.acts_as_published))
        return 1
    return 0


if __name__ == "__main__":
    run(run_worker)
