"""One worker process as the fleet holds it: started, talked to, killed. Owned by the fleet's thread."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from cormorant_worker.engine.link import LinkClosed, Payload
from cormorant_worker.engine.messages import Request, Ticket
from cormorant_worker.engine.pulse import Phase, Pulse
from cormorant_worker.engine.shared_memory import SharedMemory
from cormorant_worker.place import WorkerPlace

_MODULE = "cormorant_worker.engine.worker"


class SharedPayload:
    """Bytes in shared memory, of which workers get the descriptor."""

    def __init__(self, memory: SharedMemory, *, is_borrowed: bool) -> None:
        self.memory = memory
        self.size_bytes = memory.size_bytes
        self._is_borrowed = is_borrowed

    def close(self) -> None:
        """Close the memory, unless somebody else will."""
        if not self._is_borrowed:
            self.memory.close()


class WorkerProcess:
    """A worker and the two sockets to it: the `Link` of the local engine."""

    def __init__(self, place: WorkerPlace) -> None:
        """Start the process. It imports, then waits for `Start` on `data`."""
        self.place = place
        self.is_open = True
        self.data, theirs_data = _socket_pair()
        self.control, theirs_control = _socket_pair()
        self.pulse = Pulse.create()
        handed = (theirs_data.fileno(), theirs_control.fileno(), self.pulse.memory.descriptor)
        environment = dict(os.environ)
        # The script's own import path, so that entrypoints resolve as they do here.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *map(str, handed)],
            pass_fds=handed,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            # A session of its own: Ctrl-C in the terminal reaches the fleet alone, which then drains its workers.
            start_new_session=True,
        )
        theirs_data.close()
        theirs_control.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def phase(self) -> Phase:
        """What the worker does."""
        return self.pulse.phase

    @property
    def frames(self) -> int:
        """Frames that the worker has stepped."""
        return int(self.pulse.frames[0])

    @property
    def spent_ns(self) -> tuple[int, ...]:
        """Nanoseconds by activity."""
        return self.pulse.spent_ns

    def describe_doing(self) -> str:
        """What the worker does, in words."""
        return self.phase.name.lower()

    def sources(self) -> Iterator[Connection]:
        """Both sockets."""
        yield self.data
        yield self.control

    def receive(self, ready: Sequence[object]) -> Iterator[object]:
        """Whatever has come on the sockets that are ready. The end of the data socket is the worker's end."""
        for connection in (self.control, self.data):
            if connection not in ready:
                continue
            try:
                while self.is_open and connection.poll():
                    yield connection.recv()
            except (EOFError, OSError):
                if connection is self.data:
                    self.is_open = False

    def send(self, message: object) -> None:
        """Send on the data socket.

        Raises:
            LinkClosed: the process is gone.
        """
        self._send(self.data, message, None)

    def send_ticket(self, ticket: Ticket, memory: SharedMemory | None) -> None:
        """Send on the data socket, and a descriptor after it.

        Raises:
            LinkClosed: the process is gone.
        """
        self._send(self.data, ticket, memory)

    def request(self, request: Request, payload: Payload | None) -> None:
        """Send on the control socket, and a descriptor after it.

        Raises:
            LinkClosed: the process is gone.
        """
        assert payload is None or isinstance(payload, SharedPayload), payload
        self._send(self.control, request, payload.memory if payload is not None else None)

    def _send(self, connection: Connection, message: object, memory: SharedMemory | None) -> None:
        try:
            connection.send(message)
            if memory is not None:
                send_handle(connection, memory.descriptor, self.pid)
        except OSError as error:
            raise LinkClosed(f"worker process {self.pid} is gone: {error}") from error

    def describe_end(self) -> str:
        """How the process ended, as a clause: "was killed by SIGSEGV while building"."""
        code = self._process.poll()
        doing = f"while {Phase(self.pulse.phase).name.lower()}"
        if code is None:
            return f"closed its connection {doing}"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name} {doing}"
        return f"ended with exit code {code} {doing}"

    def kill(self) -> None:
        """End the process at once and reap it. Its subprocess environments see their pipes close and end too."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(timeout=10)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end. False when it has not after `timeout_s`."""
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Kill what is left and close the sockets."""
        self.is_open = False
        self.kill()
        self.data.close()
        self.control.close()
        self.pulse.close()


def _socket_pair() -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
