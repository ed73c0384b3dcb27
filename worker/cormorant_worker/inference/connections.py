"""Both ends of a worker's connection to an inference server: shared memory on one machine, TCP between nodes.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from cormorant_worker.inference.address import ServerAddress, this_machine
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

    observation: Arrays
    states: Arrays
    is_init: Array
    action: Arrays
    outputs: Arrays
    next_states: Arrays

    @property
    def request(self) -> Arrays:
        """Arrays that the worker writes."""
        return (*self.observation, *self.states, self.is_init)

    @property
    def answer(self) -> Arrays:
        """Arrays that the server writes."""
        return (*self.action, *self.outputs, *self.next_states)


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

        return tuple(
            [
                MailboxSlot(
                    observation=take(self.observation),
                    states=take(self.states),
                    is_init=cursor.take((self.rows,), np.dtype(np.bool_)),
                    action=take(self.action),
                    outputs=take(self.outputs),
                    next_states=take(self.states),
                )
                for _ in range(self.num_slots)
            ]
        )


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
class Listeners:
    address: ServerAddress
    """Address of both sockets, with the key that workers of other nodes need."""
    local: socket.socket
    """For workers of this machine."""
    nodes: socket.socket | None = None
    """For workers of other nodes; None: there are none."""

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return (self.local,) if self.nodes is None else (self.local, self.nodes)

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()


def listen(host: str = "") -> Listeners:
    """Listening sockets that no crash can leak. `host`: this node's address; empty: only workers of this machine."""
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.bind("")  # the kernel chooses a free abstract address, which is no file
    local.listen(_QUEUE)
    if not host:
        return Listeners(ServerAddress(local=local.getsockname()), local)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    nodes = socket.create_server((host, 0), backlog=_QUEUE, family=family)
    address = ServerAddress(
        host=host,
        port=nodes.getsockname()[1],
        key=secrets.token_bytes(32),
        machine=this_machine(),
        local=local.getsockname(),
    )
    return Listeners(address, local, nodes)


class ServerConnection:
    """A worker's end. Used by one thread. Every method raises OSError when the server is gone."""

    slots: tuple[MailboxSlot, ...]
    """After the Welcome."""

    def __init__(self, address: ServerAddress, greeting: Greeting) -> None:
        """Begin to meet a server. Raises OSError where it cannot be reached."""
        self._greeting = greeting
        self._key = b""
        """Key that both ends must know; empty: the server is on this machine."""
        self._reader = FrameReader()
        self._poll = select.poll()
        if address.is_on_this_machine:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            self._key = address.key
            peer = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
        self.messages = MessageSocket(peer)
        try:
            peer.settimeout(LOOK_S)
            if self._key:
                _use_for_rows(peer)
            else:
                peer.connect(address.local)
                self.messages.send(greeting)
        except BaseException:
            self.close()
            raise

    def read_welcome(self) -> Welcome:
        """Wait for the server's Welcome. Raises TimeoutError where it takes longer than `LOOK_S`; call again."""
        messages = self.messages
        if self._key and not messages.key:
            server, worker = messages.receive_bytes(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            messages.socket.sendall(worker + _proof(self._key, b"worker", server=server, worker=worker))
            messages.key = _proof(self._key, b"session", server=server, worker=worker)
            messages.send(self._greeting)
        welcome, descriptors = messages.receive()
        if not isinstance(welcome, Welcome):
            raise ConnectionRefusedError("the process that listens there is no inference server")
        if (layout := welcome.layout) is not None:
            size_bytes = layout.size_bytes
            memory = SharedMemory.create(size_bytes) if self._key else SharedMemory(descriptors[0], size_bytes)
            self.slots = layout.slots(ArrayCursor(memory.buffer))
            memory.close()
            messages.socket.setblocking(False)
        return welcome

    def hand_in(self, header: Header, arrays: Sequence[Array]) -> None:
        """Request actions, without waiting. The arrays must not change before the answer arrives."""
        stored = self.slots[header.slot].request
        rows: Sequence[Array] = ()
        if self._key:
            rows = [np.ascontiguousarray(a, dtype=known.dtype) for a, known in zip(arrays, stored, strict=True)]
        else:
            for target, value in zip(stored, arrays, strict=True):
                target[: header.n] = value
        send_frame(self.messages, header, rows)

    def receive(self) -> Header | None:
        """Wait for an answer; its arrays are in the slots. None: incomplete. Raises TimeoutError after `LOOK_S`."""
        peer = self.messages.socket
        self._poll.register(peer, select.POLLIN | (select.POLLOUT if self.messages.has_unsent else 0))
        if not self._poll.poll(LOOK_S * 1000):
            raise TimeoutError
        self.messages.flush()
        return self._reader.read(peer, self._answer_arrays)

    def close(self) -> None:
        self.messages.close()

    def _answer_arrays(self, header: Header) -> Sequence[Array]:
        return [a[: header.n] for a in self.slots[header.slot].answer] if self._key else ()


class ConnectedWorker:
    """A server's end of a worker's connection. Every method raises OSError when the worker is gone."""

    def __init__(self, peer: socket.socket, key: bytes = b"") -> None:
        """`key`: what a worker of another node has to know before anything of it is read; empty: it is local."""
        peer.setblocking(False)
        self.key = key
        self.messages = MessageSocket(peer)
        self.slots: tuple[MailboxSlot, ...] = ()
        """After its greeting."""
        self._reader = FrameReader()
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        if key:
            _use_for_rows(peer)
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
        return self._reader.read(self.messages.socket, self._request_arrays)

    def answer(self, header: Header) -> None:
        """Tell the worker that its actions are in the slot. They must not change until its next request."""
        arrays = [a[: header.n] for a in self.slots[header.slot].answer] if self.key else ()
        send_frame(self.messages, header, arrays)

    def _request_arrays(self, header: Header) -> Sequence[Array]:
        rows = len(self.slots[0].is_init)
        if header.slot >= len(self.slots) or header.n > rows:
            raise ConnectionAbortedError(
                f"it sent {header.n} rows for slot {header.slot}; it has {len(self.slots)} slots of {rows} rows"
            )
        return [a[: header.n] for a in self.slots[header.slot].request] if self.key else ()


class FrameReader:
    """Reads frames from a socket that does not block, each into the arrays of its slot."""

    def __init__(self) -> None:
        self._start = bytearray(HEADER.size)
        self._header: Header | None = None
        self._views = deque([memoryview(self._start)])
        """Missing part of the frame's header, later of its arrays."""
        self._at_once = 1

    def read(self, peer: socket.socket, arrays: Callable[[Header], Sequence[Array]]) -> Header | None:
        """The next frame, if it is complete. The socket stays readable while another one is waiting. `arrays`: returns
        those for a header; raises ConnectionError for one that the other end may not send. Raises OSError where the
        other end is gone.
        """
        views, whole = self._views, None
        while whole is None:
            try:
                if len(views) == 1:
                    count = peer.recv_into(views[0])
                else:
                    count = peer.recvmsg_into(list(islice(views, MOST_VIEWS)))[0]
            except BlockingIOError:
                return None
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            advance(views, count)
            if not views and self._header is None:
                self._header = Header(*HEADER.unpack(self._start))
                views.extend(_bytes_of(arrays(self._header)))
            if not views:
                whole, self._header = self._header, None
                views.append(memoryview(self._start))
            # The kernel reports the socket when it has much of a large frame, and not for each packet.
            missing = 0 if whole else sum(map(len, views))
            at_once = min(missing, _MOST_AT_ONCE) if missing > _LARGE else 1
            if at_once != self._at_once:
                self._at_once = at_once
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_once)
        return whole


def send_frame(messages: MessageSocket, header: Header, arrays: Sequence[Array]) -> None:
    """Send what the socket accepts of a frame, at most one per slot. Its arrays must not change until it is sent."""
    messages.send_bytes([HEADER.pack(*header), *_bytes_of(arrays)])


def _bytes_of(arrays: Sequence[Array]) -> Iterator[memoryview]:
    return (a.reshape(-1).view(np.uint8).data for a in arrays if a.nbytes)


def _proof(key: bytes, who: bytes, *, server: bytes, worker: bytes) -> bytes:
    """Proof that an end knows the key, valid for this connection only: from the nonces of both."""
    return hmac.digest(key, b"cormorant " + who + server + worker, "sha256")


def _use_for_rows(peer: socket.socket) -> None:
    """Send small frames at once, and notice when the other node is lost."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 4)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_AFTER_S // 4)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_S * 1000)
