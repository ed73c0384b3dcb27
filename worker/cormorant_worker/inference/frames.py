"""Rows between nodes: frames over TCP, between two ends that have proved to each other that they know the server's key.

    server -> worker   nonce
    worker -> server   nonce, proof
    server -> worker   proof
    both               Greeting, Welcome: pickled, with an authentication code that is checked before they are unpickled
    both               header, arrays, header, arrays, ...: bytes of rows and actions as they lie in memory

A frame is read into the arrays of its slot and sent from them: nothing is pickled, and no byte is copied twice.
"""

import hmac
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cormorant_worker.inference.address import NodeAddress, this_machine
from cormorant_worker.inference.handshake import QUEUE, Listeners, listen
from cormorant_worker.inference.mailbox import HEADER, Header
from cormorant_worker.spaces import Array
from cormorant_worker.wire.messages import Outbox

NONCE_BYTES = 32
PROOF_BYTES = 32
_LARGE, _MOST_AT_ONCE = 1 << 16, 1 << 20
"""Bytes: of the rest of a frame for which the kernel is to wait, and how many it waits for."""
_MOST_VIEWS = 512
"""In one call: the kernel takes 1024."""
_DEAD_AFTER_S = 20
"""A node that acknowledges nothing for so long is taken to be lost: the connection ends, and rows are asked again."""


class FrameReader:
    """Reads frames from a socket that does not block, each into the arrays of its slot."""

    def __init__(self, arrays: Callable[[Header], Sequence[Array]]) -> None:
        """Args:
        arrays: where a frame goes; it raises ConnectionError for a header that the other end may not send.
        """
        self._arrays = arrays
        self._start = bytearray(HEADER.size)
        self._header: Header | None = None
        self._views = deque([memoryview(self._start)])
        self._at_once = 1

    def read(self, peer: socket.socket) -> Iterator[Header]:
        """The frames that are complete now.

        Raises:
            OSError: the other end is gone, or sent what it may not send.
        """
        while True:
            while self._views:
                try:
                    count = peer.recvmsg_into(list(self._views)[:_MOST_VIEWS])[0]
                except BlockingIOError:
                    return
                if not count:
                    raise ConnectionResetError("the other end closed the connection")
                _advance(self._views, count)
                self._wait_for_many(peer)
            if self._header is None:
                self._header = Header(*HEADER.unpack(self._start))
                self._views.extend(_views(self._arrays(self._header)))
                self._wait_for_many(peer)
            else:
                header, self._header = self._header, None
                self._views.append(memoryview(self._start))
                yield header

    def _wait_for_many(self, peer: socket.socket) -> None:
        """Have the kernel report the socket when it has much of a large frame, and not for each packet."""
        missing = sum(map(len, self._views))
        at_once = min(missing, _MOST_AT_ONCE) if missing > _LARGE else 1
        if at_once != self._at_once:
            self._at_once = at_once
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_once)


def put_frame(outbox: Outbox, header: Header, arrays: Sequence[Array]) -> None:
    """Queue a frame. At most one a slot waits; its arrays must not change until it is sent."""
    outbox.put(HEADER.pack(*header))
    for view in _views(arrays):
        outbox.put(view)


def _views(arrays: Sequence[Array]) -> Iterator[memoryview]:
    """The bytes of contiguous arrays."""
    return (a.reshape(-1).view(np.uint8).data for a in arrays if a.nbytes)


def _advance(views: "deque[memoryview]", count: int) -> None:
    while count:
        if count < len(views[0]):
            views[0] = views[0][count:]
            return
        count -= len(views.popleft())


class Introduction:
    """One end's half of the proofs: both ends draw a nonce, and prove with both nonces that they know the key."""

    def __init__(self, key: bytes) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._key = key

    def proof(self, who: bytes, *, server: bytes, worker: bytes) -> bytes:
        """The proof of an end ("server" or "worker"), from the nonces of both."""
        return hmac.digest(self._key, b"cormorant " + who + server + worker, "sha256")


def listen_on(host: str) -> Listeners:
    """Listening sockets for workers on all nodes. `host`: address of this node's interface in the cluster.

    Raises:
        OSError: this node does not have that address.
    """
    local = listen()
    nodes = socket.create_server((host, 0), backlog=QUEUE, family=_family(host))
    address = NodeAddress(
        host=host,
        port=nodes.getsockname()[1],
        key=secrets.token_bytes(32),
        machine=this_machine(),
        local=local.getsockname(),
    )
    return Listeners(local, nodes, address)


def use_for_rows(peer: socket.socket) -> None:
    """Send small frames at once, and notice when the other node is lost."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _DEAD_AFTER_S // 4),
        ("TCP_KEEPINTVL", _DEAD_AFTER_S // 4),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _DEAD_AFTER_S * 1000),
    ):
        if hasattr(socket, option):  # Linux has all of them
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
