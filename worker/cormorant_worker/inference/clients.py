"""A server's end of each worker's connection: shared memory on one machine, frames over TCP between nodes."""

import hmac
import socket
import time
from collections.abc import Iterable, Sequence

from cormorant_worker.inference.connections import read_headers
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
from cormorant_worker.spaces import Array
from cormorant_worker.wire.messages import MessageSocket, Outbox

WELCOME_S = 5.0
"""For a worker to read what it is told."""


class LocalClient:
    """A worker of this machine. Every method raises OSError when it is gone."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self.socket = peer
        self.name = ""
        self.mailbox: Mailbox | None = None
        """From the Welcome on."""
        self.since_s = time.monotonic()
        self.messages = MessageSocket(peer)
        self._incoming = bytearray()

    @property
    def has_unsent(self) -> bool:
        return False

    def read_greeting(self) -> Greeting:
        """Raises BlockingIOError when it has not come whole."""
        greeting: Greeting = self.messages.receive()[0]
        return greeting

    def welcome(self, welcome: Welcome) -> None:
        """Tell the worker what it may do, and how to reach its mailbox."""
        self.socket.settimeout(WELCOME_S)
        try:
            self.messages.send(welcome, *self._descriptors())
        finally:
            self.socket.setblocking(False)

    def _descriptors(self) -> Sequence[int]:
        return () if self.mailbox is None else (self.mailbox.memory.descriptor,)

    def read_requests(self) -> Iterable[Header]:
        """What the worker asks for; the rows are in its mailbox."""
        return read_headers(self.socket, self._incoming)

    def answer(self, header: Header, arrays: Sequence[Array]) -> None:
        """Tell the worker that its actions, these arrays of its mailbox, are there."""
        self.socket.send(HEADER.pack(*header))

    def flush(self) -> None:
        """There is nothing to send."""


class NodeClient(LocalClient):
    """A worker of another node, which has to prove that it knows the key before anything of it is read."""

    def __init__(self, peer: socket.socket, key: bytes) -> None:
        super().__init__(peer)
        use_for_rows(peer)
        self._introduction = Introduction(key)
        self._reader = FrameReader(self._arrays_of)
        self._outbox = Outbox()
        peer.send(self._introduction.nonce)

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    @property
    def is_known(self) -> bool:
        """It has proved that it knows the key."""
        return bool(self.messages.key)

    def read_greeting(self) -> Greeting:
        if not self.is_known:
            said = self.messages.receive_bytes(NONCE_BYTES + PROOF_BYTES)
            worker, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
            if not hmac.compare_digest(proof, self._proof(b"worker", worker)):
                raise ConnectionRefusedError("it does not know the inference server's key")
            self.socket.send(self._proof(b"server", worker))
            self.messages.key = self._proof(b"session", worker)
        return super().read_greeting()

    def _proof(self, who: bytes, worker: bytes) -> bytes:
        return self._introduction.proof(who, server=self._introduction.nonce, worker=worker)

    def _descriptors(self) -> Sequence[int]:
        return ()  # each node has a mailbox of its own

    def read_requests(self) -> Iterable[Header]:
        return self._reader.read(self.socket)

    def answer(self, header: Header, arrays: Sequence[Array]) -> None:
        put_frame(self._outbox, header, arrays)
        self.flush()

    def flush(self) -> None:
        self._outbox.flush(self.socket)

    def _arrays_of(self, header: Header) -> Sequence[Array]:
        assert self.mailbox is not None
        layout = self.mailbox.layout
        if header.slot >= layout.num_slots or header.n > layout.rows:
            raise ConnectionAbortedError(
                f"it sent {header.n} rows for slot {header.slot}; it has {layout.num_slots} slots of {layout.rows} rows"
            )
        return [a[: header.n] for a in self.mailbox.slots[header.slot].request]
