"""Messages between our own processes: pickles over a stream socket, with the descriptors that belong to them.

    size of the body, u64 | number of descriptors, u32 | pickle | authentication code, where the ends share a key

Never for a socket that strangers can reach, unless both ends share a key: what comes is unpickled.
"""

import hmac
import os
import pickle
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any

_HEADER = struct.Struct("!QI")
_CHUNK_BYTES = 256 * 1024
"""Read at once."""
_MOST_DESCRIPTORS = 16
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array("i").itemsize)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MOST_VIEWS = 512
"""In one call: the kernel takes 1024."""
_CODE_BYTES = 32


class PeerGone(ConnectionResetError):
    """The other end was closed, or its process has ended."""


class Outbox:
    """What a socket has not taken yet. It costs memory, and never time where the socket does not block."""

    def __init__(self) -> None:
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def put(self, data: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        """Queue bytes, which must not change until they are sent, and duplicates of descriptors that go with them."""
        self._unsent.append((memoryview(data), tuple([os.dup(one) for one in descriptors])))

    def flush(self, peer: socket.socket) -> None:
        """Send what the socket takes.

        Raises:
            OSError: the other end is gone.
        """
        while self._unsent:
            data, descriptors = self._unsent[0]
            try:
                if descriptors:
                    sent = peer.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))])
                else:
                    plain = takewhile(lambda item: not item[1], islice(self._unsent, _MOST_VIEWS))
                    sent = peer.sendmsg([view for view, _ in plain])
            except BlockingIOError:
                return
            for one in descriptors:
                os.close(one)
            _advance(self._unsent, sent)

    def clear(self) -> None:
        for _, descriptors in self._unsent:
            for one in descriptors:
                os.close(one)
        self._unsent.clear()


def _advance(unsent: "deque[tuple[memoryview, tuple[int, ...]]]", count: int) -> None:
    """Take `count` bytes off, and the descriptors that went with them."""
    while count:
        data = unsent[0][0]
        if count < len(data):
            unsent[0] = data[count:], ()
            return
        count -= len(data)
        unsent.popleft()


class MessageSocket:
    """One end of a socket. Each direction is used by one thread at a time.

    It reads no more than the message that it returns: the socket is readable as long as another one is there.
    """

    def __init__(self, peer: socket.socket, key: bytes = b"") -> None:
        """Take a socket, which blocks, does not block, or has a timeout; `key`: what both ends sign messages with."""
        self.socket = peer
        self.key = key
        self._outbox = Outbox()
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        """Descriptors of the message that is not whole yet."""

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """The other end has not read enough for everything to be sent: `flush` when the socket can be written."""
        return bool(self._outbox)

    def send(self, message: object, *descriptors: int) -> None:
        """Send a message, and descriptors with it, of which it keeps duplicates until they are sent. A socket that does
        not block takes what it can; the rest is kept for `flush`.

        Raises what `flush` does.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if self.key:
            body += hmac.digest(self.key, body, "sha256")
        self._outbox.put(_HEADER.pack(len(body), len(descriptors)) + body, descriptors)
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as the socket takes it.

        Raises:
            PeerGone: the other end is gone.
            OSError: another reason why nothing can be sent, such as a timeout.
        """
        try:
            self._outbox.flush(self.socket)
        except ConnectionError as error:
            raise PeerGone(str(error)) from error

    def receive(self) -> tuple[Any, tuple[int, ...]]:
        """The next message, and its descriptors, which are the caller's.

        Raises:
            BlockingIOError, TimeoutError: it has not come whole. What has come is kept for the next call.
            ConnectionRefusedError: it is signed with another key, and was not unpickled.
            PeerGone: the other end is gone.
        """
        self._fill(_HEADER.size)
        size, count = _HEADER.unpack_from(self._incoming)
        self._fill(_HEADER.size + size)
        if len(self._descriptors) < count:
            raise ConnectionResetError(f"{count} descriptors were sent and fewer came; raise the limit on open files")
        body = bytes(memoryview(self._incoming)[_HEADER.size :])
        self._incoming.clear()
        if self.key:
            body, code = body[:-_CODE_BYTES], body[-_CODE_BYTES:]
            if not hmac.compare_digest(code, hmac.digest(self.key, body, "sha256")):
                raise ConnectionRefusedError("a message's authentication code is wrong; it was not read")
        descriptors = tuple([self._descriptors.popleft() for _ in range(count)])
        return pickle.loads(body), descriptors  # noqa: S301  # from a process of ours

    def receive_bytes(self, size: int) -> bytes:
        """The next bytes of a peer that does not send messages yet. Raises what `receive` does."""
        self._fill(size)
        data = bytes(self._incoming)
        self._incoming.clear()
        return data

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to receive, or the other end is gone."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _fill(self, size: int) -> None:
        while (missing := size - len(self._incoming)) > 0:
            try:
                data, rights, _, _ = self.socket.recvmsg(min(missing, _CHUNK_BYTES), _DESCRIPTOR_ROOM, _CLOSE_ON_EXEC)
            except ConnectionError as error:
                raise PeerGone(str(error)) from error
            for level, kind, value in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._descriptors.extend(array("i", value[: len(value) // 4 * 4]))
            if not data:
                raise PeerGone("the other end closed the connection")
            self._incoming += data
            if len(data) < missing and self.socket.gettimeout() == 0:
                raise BlockingIOError  # a peer that says much does not keep a thread from its other sockets

    def close(self) -> None:
        """Close the socket, and the descriptors that were not sent or not received whole. May be called twice."""
        self._outbox.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self.socket.close()
