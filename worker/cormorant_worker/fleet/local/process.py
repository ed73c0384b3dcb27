"""One worker process as the fleet holds it: started, talked to, killed. Owned by the fleet's thread."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.local.channel import Channel, channel_pair
from cormorant_worker.fleet.transport import ConnectionClosed, Payload
from cormorant_worker.fork_server import ForkServer, Imports, kill_alone
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.worker.heartbeat import Heartbeat, Phase
from cormorant_worker.worker.messages import Request, Ticket

_OBEYED_S = 5.0
"""A fork server that is not importing kills at once."""


class SharedPayload:
    """Bytes in shared memory, of which workers get the descriptor."""

    def __init__(self, memory: SharedMemory, *, is_borrowed: bool) -> None:
        self.memory = memory
        self.size_bytes = memory.size_bytes
        self._is_borrowed = is_borrowed

    def close(self) -> None:
        if not self._is_borrowed:
            self.memory.close()


class WorkerProcess:
    """A worker and the two sockets to it: the `Link` of the local engine."""

    def __init__(self, place: WorkerPlace, fork_server: ForkServer, imports: Imports) -> None:
        """Have the process forked. It waits for `Start` on `data`."""
        self.place = place
        self.is_open = True
        self.data, theirs_data = channel_pair()
        self.control, theirs_control = channel_pair()
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

    def sources(self) -> Sequence[Channel]:
        return (self.control, self.data)

    def receive(self, source: object) -> Sequence[object]:
        # The end of the data socket is the worker's end.
        if not self.is_open:
            return ()
        if source is self.control:
            return self._read(self.control)
        try:
            return self.data.receive()
        except EOFError:
            last = self._read(self.control)  # what it said before it ended
            self.is_open = False
            return last

    def _read(self, channel: Channel) -> Sequence[object]:
        try:
            return channel.receive()
        except EOFError:
            return ()

    def unsent(self) -> Sequence[Channel]:
        return [channel for channel in (self.control, self.data) if channel.has_unsent] if self.is_open else ()

    def flush(self, source: object) -> None:
        assert isinstance(source, Channel), source
        with suppress(OSError):  # that the worker is gone shows at its data socket
            source.flush()

    def send(self, message: object, descriptor: int = -1) -> None:
        """Send on the data socket, and a descriptor after it; -1: none."""
        self._send(self.data, message, descriptor)

    def send_ticket(self, ticket: Ticket, memory: SharedMemory | None) -> None:
        self.send(ticket, memory.descriptor if memory is not None else -1)

    def request(self, request: Request, payload: Payload | None) -> None:
        assert payload is None or isinstance(payload, SharedPayload), payload
        self._send(self.control, request, payload.memory.descriptor if payload is not None else -1)

    def _send(self, channel: Channel, message: object, descriptor: int) -> None:
        try:
            channel.send(message, descriptor)
        except OSError as error:
            raise ConnectionClosed(f"worker process {self.pid} is gone: {error}") from error

    def describe_end(self) -> str:
        # Its sockets close a moment before it has ended.
        code = self._return_code(timeout_s=0.5)
        doing = f"while {self.phase.name.lower()}"
        if code is None:
            return self._fork_server.describe_end() or f"closed its connection {doing}"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name} {doing}"
        return f"ended with exit code {code} {doing}"

    def kill(self) -> None:
        if self._is_closed:
            return
        self._fork_server.kill(self._number)
        if not self.wait(_OBEYED_S):
            kill_alone(self.pid, self.data)
            self.wait(10)

    def wait(self, timeout_s: float) -> bool:
        return self._return_code(timeout_s) is not None or not self._is_running()

    def _return_code(self, timeout_s: float) -> int | None:
        return self._fork_server.wait(self._number, timeout_s) if self.pid else None  # it is not forked yet

    def _is_running(self) -> bool:
        if not self.pid:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        self.is_open = False
        self.kill()
        self._is_closed = True
        self._fork_server.forget(self._number)
        self.data.close()
        self.control.close()
        self.heartbeat.close()
