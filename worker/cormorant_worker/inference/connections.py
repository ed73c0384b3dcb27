"""A worker's way to its inference server: shared memory on one machine, frames over TCP between nodes."""

import hmac
import select
import socket
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from cormorant_worker.inference.address import Address, NodeAddress
from cormorant_worker.inference.frames import (
    NONCE_BYTES,
    PROOF_BYTES,
    FrameReader,
    Introduction,
    put_frame,
    use_for_rows,
)
from cormorant_worker.inference.handshake import Greeting, Welcome
from cormorant_worker.inference.mailbox import HEADER, Header, Mailbox
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.spaces import Array
from cormorant_worker.wire.messages import MessageSocket, Outbox

LOOK_S = 0.5
"""While it waits for a server, a worker looks this often whether it was told to pause or to stop."""
_CONNECT_S = 3.0
_CHUNK_BYTES = 4096


class ServerConnection(Protocol):
    """Used by one thread. Every method raises OSError when the server is gone."""

    mailbox: Mailbox
    """After the Welcome."""

    def read_welcome(self) -> Welcome:
        """Wait for the server's Welcome.

        Raises:
            TimeoutError: it did not come in `LOOK_S`; call again.
        """

    def hand_in(self, header: Header, arrays: Sequence[Array]) -> None:
        """Ask for actions. The arrays must not change before the answer is here. Does not wait for the server."""

    def receive(self) -> Sequence[Header]:
        """Wait for answers; their arrays are in the mailbox's slots.

        Raises:
            TimeoutError: nothing came in `LOOK_S`.
        """

    def close(self) -> None: ...


class SharedMemoryConnection:
    def __init__(self, address: bytes | str, greeting: Greeting) -> None:
        """Connect to a server of this machine.

        Raises:
            OSError: it cannot be reached.
        """
        self.mailbox: Mailbox
        self._incoming = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(LOOK_S)
            self._socket.connect(address)
            self._messages = MessageSocket(self._socket)
            self._messages.send(greeting)
        except BaseException:
            self._socket.close()
            raise

    def read_welcome(self) -> Welcome:
        welcome: Welcome
        welcome, descriptors = self._messages.receive()
        if welcome.layout is not None:
            self.mailbox = Mailbox(welcome.layout, SharedMemory(descriptors[0], welcome.layout.size_bytes))
        return welcome

    def hand_in(self, header: Header, arrays: Sequence[Array]) -> None:
        for stored, value in zip(self.mailbox.slots[header.slot].request, arrays, strict=True):
            stored[: header.n] = value
        self._socket.sendall(HEADER.pack(*header))

    def receive(self) -> Sequence[Header]:
        return read_headers(self._socket, self._incoming)

    def close(self) -> None:
        self._messages.close()


class NodeConnection:
    def __init__(self, address: NodeAddress, greeting: Greeting) -> None:
        """Connect to a server of another node.

        Raises:
            OSError: it cannot be reached.
        """
        self.mailbox: Mailbox
        self._greeting = greeting
        self._introduction = Introduction(address.key)
        self._server_nonce = b""
        self._reader = FrameReader(lambda header: [a[: header.n] for a in self.mailbox.slots[header.slot].answer])
        self._outbox = Outbox()
        self._socket = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
        self._socket.settimeout(LOOK_S)
        use_for_rows(self._socket)
        self._messages = MessageSocket(self._socket)

    def read_welcome(self) -> Welcome:
        if not self._server_nonce:
            self._server_nonce = self._messages.receive_bytes(NONCE_BYTES)
            self._socket.sendall(self._introduction.nonce + self._proof(b"worker"))
        if not self._messages.key:
            if not hmac.compare_digest(self._messages.receive_bytes(PROOF_BYTES), self._proof(b"server")):
                raise ConnectionRefusedError("the process that listens there does not know the inference server's key")
            self._messages.key = self._proof(b"session")
            self._messages.send(self._greeting)
        welcome: Welcome = self._messages.receive()[0]
        if welcome.layout is not None:
            self.mailbox = Mailbox.create(welcome.layout)
            self.mailbox.close()
            self._socket.setblocking(False)
        return welcome

    def _proof(self, who: bytes) -> bytes:
        return self._introduction.proof(who, server=self._server_nonce, worker=self._introduction.nonce)

    def hand_in(self, header: Header, arrays: Sequence[Array]) -> None:
        stored = self.mailbox.slots[header.slot].request
        rows = [np.ascontiguousarray(a, dtype=known.dtype) for a, known in zip(arrays, stored, strict=True)]
        put_frame(self._outbox, header, rows)
        self._outbox.flush(self._socket)

    def receive(self) -> Sequence[Header]:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        if not poll.poll(LOOK_S * 1000):
            raise TimeoutError
        self._outbox.flush(self._socket)
        return list(self._reader.read(self._socket))

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, greeting: Greeting) -> ServerConnection:
    """Begin to meet a server.

    Raises:
        OSError: it cannot be reached.
    """
    if not isinstance(address, NodeAddress):
        return SharedMemoryConnection(address, greeting)
    if address.is_on_this_machine:
        return SharedMemoryConnection(address.local, greeting)
    return NodeConnection(address, greeting)


def read_headers(peer: socket.socket, incoming: bytearray) -> list[Header]:
    """The headers that have come whole. `incoming` keeps the beginning of the next one.

    Raises:
        OSError: the other end is gone.
    """
    if not (data := peer.recv(_CHUNK_BYTES)):
        raise ConnectionResetError("the other end closed the connection")
    incoming += data
    whole = len(incoming) // HEADER.size * HEADER.size
    found = [Header(*values) for values in HEADER.iter_unpack(incoming[:whole])]
    del incoming[:whole]
    return found
