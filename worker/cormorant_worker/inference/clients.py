"""A server's end of each worker's connection: shared memory on one machine, frames over TCP between nodes."""

import hmac
import socket
import time
from collections.abc import Iterable, Sequence

from cormorant_worker.inference.connections import take_headers
from cormorant_worker.inference.frames import (
    NONCE_BYTES,
    PROOF_BYTES,
    FrameReader,
    FrameWriter,
    Introduction,
    use_for_rows,
)
from cormorant_worker.inference.handshake import Greeting, Welcome, frame, send_welcome, unframe
from cormorant_worker.inference.mailbox import HEADER, Header, Mailbox
from cormorant_worker.spaces import Array

WELCOME_S = 5.0
"""For a worker to read what it is told."""
_CHUNK_BYTES = 4096


class LocalClient:
    """A worker of this machine. Every method raises OSError when it is gone."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self.socket = peer
        self.name = ""
        self.mailbox: Mailbox | None = None
        """From the Welcome on."""
        self.since_s = time.monotonic()
        self._incoming = bytearray()

    @property
    def has_unsent(self) -> bool:
        return False

    def read_greeting(self) -> Greeting | None:
        """None: it is not whole yet."""
        self._read()
        return self._unframe()

    def welcome(self, welcome: Welcome) -> None:
        """Tell the worker what it may do, and how to reach its mailbox."""
        self.socket.settimeout(WELCOME_S)
        try:
            self._send(welcome)
        finally:
            self.socket.setblocking(False)

    def _send(self, welcome: Welcome) -> None:
        send_welcome(self.socket, welcome, -1 if self.mailbox is None else self.mailbox.memory.descriptor)

    def read_requests(self) -> Iterable[Header]:
        """What the worker asks for; the rows are in its mailbox."""
        self._read()
        return take_headers(self._incoming)

    def answer(self, header: Header, arrays: Sequence[Array]) -> None:
        """Tell the worker that its actions, these arrays of its mailbox, are there."""
        self.socket.send(HEADER.pack(*header))

    def flush(self) -> None:
        """There is nothing to send."""

    def _unframe(self, key: bytes = b"") -> Greeting | None:
        greeting = unframe(self._incoming, key=key)
        assert greeting is None or isinstance(greeting, Greeting), greeting
        return greeting

    def _read(self) -> None:
        data = self.socket.recv(_CHUNK_BYTES)
        if not data:
            raise ConnectionResetError("the worker closed the connection")
        self._incoming += data


class NodeClient(LocalClient):
    """A worker of another node, which has to prove that it knows the key before anything of it is read."""

    def __init__(self, peer: socket.socket, key: bytes) -> None:
        super().__init__(peer)
        use_for_rows(peer)
        self._introduction = Introduction(key)
        self._session_key = b""
        self._reader = FrameReader(self._arrays_of)
        self._writer = FrameWriter()
        peer.send(self._introduction.nonce)

    @property
    def has_unsent(self) -> bool:
        return self._writer.has_unsent

    @property
    def is_known(self) -> bool:
        """It has proved that it knows the key."""
        return bool(self._session_key)

    def read_greeting(self) -> Greeting | None:
        self._read()
        if not self._session_key:
            if len(self._incoming) < NONCE_BYTES + PROOF_BYTES:
                return None
            worker, proof = bytes(self._incoming[:NONCE_BYTES]), bytes(self._incoming[NONCE_BYTES:])
            self._incoming.clear()
            if not hmac.compare_digest(proof, self._proof(b"worker", worker)):
                raise ConnectionRefusedError("it does not know the inference server's key")
            self.socket.send(self._proof(b"server", worker))
            self._session_key = self._proof(b"session", worker)
        return self._unframe(self._session_key)

    def _proof(self, who: bytes, worker: bytes) -> bytes:
        return self._introduction.proof(who, server=self._introduction.nonce, worker=worker)

    def _send(self, welcome: Welcome) -> None:
        self.socket.sendall(frame(welcome, key=self._session_key))

    def read_requests(self) -> Iterable[Header]:
        return self._reader.read(self.socket)

    def answer(self, header: Header, arrays: Sequence[Array]) -> None:
        self._writer.put(header, arrays)
        self.flush()

    def flush(self) -> None:
        self._writer.flush(self.socket)

    def _arrays_of(self, header: Header) -> Sequence[Array]:
        assert self.mailbox is not None
        layout = self.mailbox.layout
        if header.slot >= layout.num_slots or header.n > layout.rows:
            raise ConnectionAbortedError(
                f"it sent {header.n} rows for slot {header.slot}; it has {layout.num_slots} slots of {layout.rows} rows"
            )
        return [a[: header.n] for a in self.mailbox.slots[header.slot].request]
