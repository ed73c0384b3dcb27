"""One worker process as the fleet holds it: started, talked to, killed. Owned by the fleet's thread."""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.transport import Payload
from cormorant_worker.fork_server import ForkServer, Imports, kill_alone
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.wire.messages import MessageSocket
from cormorant_worker.worker.heartbeat import Heartbeat, Phase
from cormorant_worker.worker.messages import Request, Ticket

_OBEYED_S = 5.0
"""A fork server that is not importing kills at once."""
_MOST_MESSAGES = 64
"""Read at once: a worker that says much does not keep the fleet from the others."""


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

    def send(self, message: object, *descriptors: int) -> None:
        with suppress(OSError):  # as in `flush`
            self.data.send(message, *descriptors)

    def send_ticket(self, ticket: Ticket, memory: SharedMemory | None) -> None:
        self.send(ticket, *([] if memory is None else [memory.descriptor]))

    def request(self, request: Request, payload: Payload | None) -> None:
        assert payload is None or isinstance(payload, SharedPayload), payload
        with suppress(OSError):  # as in `flush`
            self.control.send(request, *([] if payload is None else [payload.memory.descriptor]))

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


def _pair() -> tuple[MessageSocket, socket.socket]:
    """The fleet's end, which never waits for the worker, and the worker's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return MessageSocket(ours), theirs


def _whole_messages(channel: MessageSocket) -> tuple[list[object], bool]:
    """What has come whole, a bounded number of messages; and whether the other end is gone."""
    messages: list[object] = []
    try:
        while len(messages) < _MOST_MESSAGES:
            messages.append(channel.receive()[0])
    except BlockingIOError:
        return messages, False
    except OSError:
        return messages, True
    return messages, False
