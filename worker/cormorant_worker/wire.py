"""Memory and messages between processes of one machine: anonymous shared memory, and messages with descriptors.

Shared memory has a descriptor and no name, so that no crash can leak it. A message is a pickle over a stream socket:

    size of the body, u64 | number of descriptors, u32 | pickle | authentication code, where the ends share a key

Never use it for a socket that strangers can reach, unless both ends share a key: messages are unpickled.
"""

import hmac
import math
import mmap
import os
import pickle
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from cormorant_worker.errors import FleetError
from cormorant_worker.spaces import Array

_ALIGNMENT = 64
"""A cache line: no two arrays share one."""

_HEADER = struct.Struct("!QI")
_CHUNK_BYTES = 256 * 1024
"""Read at once."""
_MOST_DESCRIPTORS = 16
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array("i").itemsize)
MOST_VIEWS = 512
"""Maximum number of views per call: the kernel accepts 1024."""
_CODE_BYTES = 32


class SharedMemory:
    """A mapping of anonymous shared memory. Pages use memory once they are written."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map a descriptor that `create` made in this or another process; it belongs to this object from now on."""
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> "SharedMemory":
        """Create zeroed memory."""
        try:
            descriptor = os.memfd_create("cormorant")
            try:
                os.ftruncate(descriptor, size_bytes)
            except OSError:
                os.close(descriptor)
                raise
            return cls(descriptor, size_bytes)
        except OSError as error:
            raise FleetError(f"cannot allocate {size_bytes:,} bytes of shared memory: {error}") from error

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self._map)

    def close(self) -> None:
        """Close the descriptor, as the last reference does. The mapping lives as long as arrays over it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close


class ArrayCursor:
    """Allocates consecutive arrays from a buffer. Without a buffer it only measures: arrays are empty."""

    def __init__(self, buffer: Any = None, *, offset: int = 0) -> None:
        self.size_bytes = offset
        """Bytes up to the end of the last array that was taken, rounded up."""
        self._buffer = buffer

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        offset = self.size_bytes
        self.size_bytes += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, buffer=self._buffer, offset=offset)


class PeerGone(ConnectionResetError):
    """The other end was closed, or its process has ended."""


class MessageSocket:
    """One end of a socket. It reads no more than a message: the socket stays readable for the next one."""

    def __init__(self, peer: socket.socket, key: bytes = b"") -> None:
        """Take a socket, which blocks, does not block, or has a timeout; `key`: what both ends sign messages with."""
        self.socket = peer
        self.key = key
        self._unsent: deque[tuple[deque[memoryview], list[int]]] = deque()
        """Bytes that the socket has not taken yet, and duplicates of the descriptors that go with the first byte."""
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        """Descriptors of the message that is not whole yet."""

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while bytes wait to be sent: call `flush` when the socket is writable."""
        return bool(self._unsent)

    def send(self, message: object, *descriptors: int) -> None:
        """Send a message with descriptors, of which it keeps duplicates until they are sent. A nonblocking socket sends
        what it can; the rest is buffered for `flush`, whose errors it raises.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if self.key:
            body += hmac.digest(self.key, body, "sha256")
        self.send_bytes([_HEADER.pack(len(body), len(descriptors)) + body], descriptors)

    def send_bytes(self, parts: Iterable[bytes | memoryview], descriptors: Sequence[int] = ()) -> None:
        """Send raw bytes, one or more nonempty parts. They must not change until they are sent."""
        self._unsent.append((deque([memoryview(part) for part in parts]), [os.dup(one) for one in descriptors]))
        self.flush()

    def flush(self) -> None:
        """Send what the socket accepts. Raises PeerGone, or OSError for another reason, such as a timeout."""
        while self._unsent:
            views, descriptors = self._unsent[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
            try:
                sent = self.socket.sendmsg(list(islice(views, MOST_VIEWS)), rights)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise PeerGone(str(error)) from error
            while descriptors:
                os.close(descriptors.pop())
            advance(views, sent)
            if not views:
                self._unsent.popleft()

    def receive(self) -> tuple[Any, tuple[int, ...]]:
        """Receive the next message and its descriptors, which the caller owns. Raises BlockingIOError or TimeoutError
        while it is incomplete, whose received part is kept; ConnectionRefusedError where it is signed with another key,
        and was not unpickled; PeerGone.
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
        """Receive raw bytes of a peer that does not send messages yet. Raises the errors of `receive`."""
        self._fill(size)
        data = bytes(self._incoming)
        self._incoming.clear()
        return data

    def wait(self, timeout_s: float) -> bool:
        """Wait until data can be received, or the other end is gone."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _fill(self, size: int) -> None:
        while (missing := size - len(self._incoming)) > 0:
            try:
                data, rights, _, _ = self.socket.recvmsg(
                    min(missing, _CHUNK_BYTES), _DESCRIPTOR_ROOM, socket.MSG_CMSG_CLOEXEC
                )
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
        for _, descriptors in self._unsent:
            self._descriptors.extend(descriptors)
        self._unsent.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self.socket.close()


def advance(views: deque[memoryview], count: int) -> None:
    """Drop the first `count` bytes."""
    while count:
        if count < len(views[0]):
            views[0] = views[0][count:]
            return
        count -= len(views.popleft())
