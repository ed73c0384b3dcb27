"""Both ends of a worker's connection to an inference server: shared memory in local fleets, TCP on clusters.

Each server process listens at its own address and reports it to the fleet, which tells the workers. A worker whose
server is gone tries the other known servers until it is assigned another one.

    server -> worker   nonce         } between nodes: the worker proves that it knows the server's key
    worker -> server   nonce, proof  }
    worker -> server   Greeting      } pickled; between nodes with an authentication code by the key and both nonces,
    server -> worker   Welcome       } checked before they are unpickled, on one machine with the mailbox's descriptor
    both               frames: header, arrays, header, arrays, ...

The arrays are in the worker's mailbox, which has one slot for each EnvGroup, so that the rows of one wait while another
one steps. The bytes of a slot belong to the worker until it has sent a request, then to the server until it has sent
the answer: the socket orders them. On one machine both ends map the mailbox, and a frame is only its header. Between
nodes each end has its own, and a frame is read into the arrays of its slot and sent from them: nothing is pickled, and
no byte is copied twice.

    slot:  observation leaves | states | is_init  ->  actions | outputs | next states        [rows, ...] each

# n rows of a request, at most `rows`
"""

import hmac
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from cormorant_worker.inference.address import ServerAddress
from cormorant_worker.spaces import Array, Arrays, Leaf, Space
from cormorant_worker.weights.staged import WeightSpecs
from cormorant_worker.wire import MOST_VIEWS, ArrayCursor, MessageSocket, SharedMemory, advance

LOOK_S = 0.5
"""Interval at which a worker that waits for a server checks whether to pause or stop."""
_CONNECT_S = 3.0
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LARGE, _MOST_AT_ONCE = 1 << 16, 1 << 20
"""Sizes in bytes: of a frame's rest from which the kernel waits for more, and of one such wait."""
_DEAD_AFTER_S = 20
"""A node that acknowledges nothing for so long is taken to be lost: the connection ends, and rows are asked again."""
_QUEUE = 1024
"""Workers that wait to be accepted."""
HEADER = struct.Struct("=qqII")
"""A `Header` as bytes."""


class Header(NamedTuple):
    """Begins a request and its answer."""

    number: int
    version: int
    """In a request, the lowest version that may be used; in an answer, the version that was used."""
    slot: int
    n: int


class MailboxSlot(NamedTuple):
    """Views of one slot, `[rows, ...]` each."""

    request: Arrays
    """Observation, states and is_init, which the worker writes."""
    action: Arrays
    outputs: Arrays
    states: Arrays
    """The next ones."""

    @property
    def answer(self) -> Arrays:
        """Arrays that the server writes."""
        return (*self.action, *self.outputs, *self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxLayout:
    """Layout on which both ends must agree."""

    rows: int
    num_slots: int
    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[Leaf, ...]

    @property
    def size_bytes(self) -> int:
        self.slots(cursor := ArrayCursor())
        return cursor.size_bytes

    def slots(self, cursor: ArrayCursor) -> tuple[MailboxSlot, ...]:
        """The slots over the memory of a cursor, one after another. It lives as long as they do."""

        def take(leaves: tuple[Leaf, ...]) -> Arrays:
            return tuple([cursor.take((self.rows, *leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves])

        request = (*self.observation, *self.states, _IS_INIT)
        parts = (request, self.action, self.outputs, self.states)
        return tuple([MailboxSlot(*map(take, parts)) for _ in range(self.num_slots)])


_IS_INIT = Leaf(key=("is_init",), shape=(), dtype=np.dtype(np.bool_))


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Worker -> server: the format of its rows."""

    name: str
    observation_space: Space
    action_space: Space
    rows: int
    """Maximum number of rows per request."""
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Server -> worker: the format of the policy's results. Comes with the mailbox's descriptor, or a refusal."""

    layout: MailboxLayout | None = None
    initial_states: Arrays = ()
    specs: WeightSpecs | None = None
    refusal: str = ""
    """Why this worker's rows do not fit; empty: they do."""


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    address: ServerAddress
    socket: socket.socket


def listen(host: str = "") -> ListeningSocket:
    """A listening socket that no crash can leak. `host`: this node's address; empty: only workers of this machine."""
    if not host:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind("")  # the kernel chooses a free abstract address, which is no file
        local.listen(_QUEUE)
        return ListeningSocket(ServerAddress(local=local.getsockname()), local)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    nodes = socket.create_server((host, 0), backlog=_QUEUE, family=family)
    address = ServerAddress(host=host, port=nodes.getsockname()[1], key=secrets.token_bytes(32))
    return ListeningSocket(address, nodes)


class _End:
    """One end of a connection. Every method raises OSError when the other end is gone."""

    slots: tuple[MailboxSlot, ...] = ()
    """After the Welcome."""

    def __init__(self, peer: socket.socket, key: bytes) -> None:
        self.key = key
        """Key that both ends must know; empty: they are on one machine."""
        self.messages = MessageSocket(peer)
        self._frames: Iterator[Header | None]
        if not key:
            return
        # Small frames are sent at once, and the loss of the other node is noticed.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 4)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_AFTER_S // 4)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_S * 1000)

    def open(self, slots: tuple[MailboxSlot, ...], received: Callable[[MailboxSlot], Arrays]) -> None:
        """Frames follow. `received`: arrays of a slot that the other end writes."""
        self.slots = slots
        rows, is_shared = len(slots[0].request[-1]), not self.key

        def arrays(header: Header) -> Sequence[Array]:
            if header.slot >= len(slots) or header.n > rows:
                raise ConnectionAbortedError(
                    f"it sent {header.n} rows for slot {header.slot}; there are {len(slots)} slots of {rows} rows"
                )
            return () if is_shared else [a[: header.n] for a in received(slots[header.slot])]

        self._frames = read_frames(self.messages.socket, arrays)


class ServerConnection(_End):
    """A worker's end. Used by one thread."""

    def __init__(self, address: ServerAddress, greeting: Greeting) -> None:
        """Begin to meet a server. Raises OSError where it cannot be reached."""
        self._greeting = greeting
        self._poll = select.poll()
        if address.key:
            peer = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
        else:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            super().__init__(peer, address.key)
            peer.settimeout(LOOK_S)
            if not address.key:
                peer.connect(address.local)
                self.messages.send(greeting)
        except BaseException:
            peer.close()
            raise

    def read_welcome(self) -> Welcome:
        """Wait for the server's Welcome. Raises TimeoutError where it takes longer than `LOOK_S`; call again."""
        messages = self.messages
        if self.key and not messages.key:
            server, worker = messages.receive_bytes(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            messages.socket.sendall(worker + _proof(self.key, b"worker", server=server, worker=worker))
            messages.key = _proof(self.key, b"session", server=server, worker=worker)
            messages.send(self._greeting)
        welcome, descriptors = messages.receive()
        if not isinstance(welcome, Welcome):
            raise ConnectionRefusedError("the process that listens there is no inference server")
        if (layout := welcome.layout) is not None:
            size_bytes = layout.size_bytes
            memory = SharedMemory.create(size_bytes) if self.key else SharedMemory(descriptors[0], size_bytes)
            self.open(layout.slots(ArrayCursor(memory.buffer)), lambda slot: slot.answer)
            memory.close()
            messages.socket.setblocking(False)
        return welcome

    def hand_in(self, header: Header, arrays: Sequence[Array]) -> None:
        """Request actions, without waiting. The arrays must not change before the answer arrives."""
        stored = self.slots[header.slot].request
        rows: Sequence[Array] = ()
        if self.key:
            rows = [np.ascontiguousarray(a, dtype=known.dtype) for a, known in zip(arrays, stored, strict=True)]
        else:
            for target, value in zip(stored, arrays, strict=True):
                target[: header.n] = value
        send_frame(self.messages, header, rows)

    def receive(self) -> Header | None:
        """Wait for an answer; its arrays are in the slots. None: incomplete. Raises TimeoutError after `LOOK_S`."""
        self._poll.register(self.messages, select.POLLIN | (select.POLLOUT if self.messages.has_unsent else 0))
        if not self._poll.poll(LOOK_S * 1000):
            raise TimeoutError
        self.messages.flush()
        return next(self._frames)

    def close(self) -> None:
        self.messages.close()


class ConnectedWorker(_End):
    """A server's end of a worker's connection."""

    def __init__(self, peer: socket.socket, key: bytes = b"") -> None:
        """`key`: what a worker of another node has to know before anything of it is read; empty: it is local."""
        super().__init__(peer, key)
        peer.setblocking(False)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        if key:
            peer.send(self._nonce)

    @property
    def is_known(self) -> bool:
        """The worker is on this machine, or has proved that it knows the key."""
        return not self.key or bool(self.messages.key)

    def read_greeting(self) -> Greeting:
        """Read the Greeting. Raises BlockingIOError while it is incomplete."""
        messages = self.messages
        if not self.is_known:
            said = messages.receive_bytes(_NONCE_BYTES + _PROOF_BYTES)
            worker, proof = said[:_NONCE_BYTES], said[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(self.key, b"worker", server=self._nonce, worker=worker)):
                raise ConnectionRefusedError("it does not know the inference server's key")
            messages.key = _proof(self.key, b"session", server=self._nonce, worker=worker)
        greeting: Greeting = messages.receive()[0]
        return greeting

    def read_request(self) -> Header | None:
        """The worker's request; the rows are in its slots. None: incomplete so far."""
        return next(self._frames)

    def answer(self, header: Header) -> None:
        """Tell the worker that its actions are in the slot. They must not change until its next request."""
        arrays = [a[: header.n] for a in self.slots[header.slot].answer] if self.key else ()
        send_frame(self.messages, header, arrays)


def read_frames(peer: socket.socket, arrays: Callable[[Header], Sequence[Array]]) -> Iterator[Header | None]:
    """Read frames from a socket that does not block. Yields the header of each whose arrays are read, and None where
    the rest is not there yet. The socket stays readable while another frame is waiting. `arrays`: returns those to
    read into; raises ConnectionError for a header that the other end may not send. Raises OSError where it is gone.
    """
    start = bytearray(HEADER.size)
    while True:
        yield from _read_into(peer, [memoryview(start)])
        header = Header(*HEADER.unpack(start))
        if rows := arrays(header):
            yield from _read_into(peer, _bytes_of(rows))
        yield header


def _read_into(peer: socket.socket, parts: Iterable[memoryview]) -> Iterator[None]:
    views, at_once = deque(parts), 1
    while views:
        try:
            count = peer.recvmsg_into(list(islice(views, MOST_VIEWS)))[0]
        except BlockingIOError:
            # The kernel reports the socket when it has much of a large frame, and not for each packet.
            missing = sum(map(len, views))
            wanted = min(missing, _MOST_AT_ONCE) if missing > _LARGE else 1
            if wanted != at_once:
                at_once = wanted
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_once)
            yield None
            continue
        if not count:
            raise ConnectionResetError("the other end closed the connection")
        advance(views, count)
    if at_once != 1:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def send_frame(messages: MessageSocket, header: Header, arrays: Sequence[Array]) -> None:
    """Send what the socket accepts of a frame, at most one per slot. Its arrays must not change until it is sent."""
    messages.send_bytes([HEADER.pack(*header), *_bytes_of(arrays)])


def _bytes_of(arrays: Sequence[Array]) -> Iterator[memoryview]:
    return (a.reshape(-1).view(np.uint8).data for a in arrays if a.nbytes)


def _proof(key: bytes, who: bytes, *, server: bytes, worker: bytes) -> bytes:
    """Proof that an end knows the key, valid for this connection only: from the nonces of both."""
    return hmac.digest(key, b"cormorant " + who + server + worker, "sha256")
