"""The fleet's end of a socket to a worker: messages in and out, and no call waits for the worker.

The wire is that of `multiprocessing.connection`, which the worker's end is: a length and a pickle, and one byte more
for a descriptor that belongs to the message. A worker that does not read costs memory here, never time.
"""

import array
import os
import pickle
import socket
import struct
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

_SHORT, _LONG = struct.Struct("!i"), struct.Struct("!Q")
_LONGEST_SHORT = 0x7FFFFFFF
_CHUNK_BYTES = 256 * 1024
"""Read at once: a worker that says much does not keep the fleet from the others."""


def channel_pair() -> tuple["Channel", Connection]:
    """Ours, which never waits, and theirs."""
    ours, theirs = socket.socketpair()
    return Channel(ours), Connection(theirs.detach())


class Channel:
    """One socket. Guarded by the fleet's condition."""

    def __init__(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._socket = ours
        self._incoming = bytearray()
        self._unsent: deque[tuple[memoryview, int]] = deque()
        """Bytes, and the descriptor that goes with them; -1: none."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while the worker has not read enough for everything to be sent: `flush` when it can be written."""
        return bool(self._unsent)

    def send(self, message: object, descriptor: int = -1) -> None:
        """Send a message, and a descriptor with it. What the socket does not take now is kept, and the descriptor's
        duplicate with it.

        Raises:
            OSError: the worker is gone.
        """
        data = bytes(ForkingPickler.dumps(message))
        size = len(data)
        header = _SHORT.pack(size) if size <= _LONGEST_SHORT else _SHORT.pack(-1) + _LONG.pack(size)
        self._unsent.append((memoryview(header + data), -1))
        if descriptor >= 0:
            self._unsent.append((memoryview(b"\x01"), os.dup(descriptor)))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            OSError: the worker is gone.
        """
        while self._unsent:
            data, descriptor = self._unsent[0]
            try:
                if descriptor < 0:
                    sent = self._socket.send(data)
                else:
                    rights = array.array("i", [descriptor])
                    sent = self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except BlockingIOError:
                return
            if descriptor >= 0:
                os.close(descriptor)
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = (data[sent:], -1)

    def receive(self) -> list[object]:
        """Messages that have come whole; the beginning of another is kept.

        Raises:
            EOFError: the worker's end is closed, and everything it sent was received.
        """
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the worker's end is closed")
        self._incoming += data
        return self._whole_messages()

    def _whole_messages(self) -> list[object]:
        messages: list[object] = []
        begin, incoming = 0, self._incoming
        while len(incoming) - begin >= _SHORT.size:
            (size,) = _SHORT.unpack_from(incoming, begin)
            start = begin + _SHORT.size
            if size == -1:
                if len(incoming) - start < _LONG.size:
                    break
                (size,) = _LONG.unpack_from(incoming, start)
                start += _LONG.size
            if len(incoming) - start < size:
                break
            with memoryview(incoming) as view:
                messages.append(pickle.loads(view[start : start + size]))  # noqa: S301  # from a process of ours
            begin = start + size
        del incoming[:begin]
        return messages

    def close(self) -> None:
        """Let go of the socket and of what was not sent. May be called twice."""
        for _, descriptor in self._unsent:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)
        self._unsent.clear()
        self._socket.close()
