"""How a worker and an inference server meet: one Greeting, one Welcome with the mailbox's descriptor.

The fleet holds the listening socket of each server's slot for as long as the slot exists. A worker that connects while
no server runs waits in the queue of that socket, and the next server accepts it.
"""

import os
import secrets
import socket
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cormorant_worker.inference.address import NodeAddress, this_machine
from cormorant_worker.inference.mailbox import MailboxLayout
from cormorant_worker.spaces import Arrays, Space
from cormorant_worker.weights.staged import WeightSpecs

_QUEUE = 1024
"""Workers that wait to be accepted."""
_PEER = struct.Struct("=iII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Worker -> server: what its rows look like."""

    name: str
    observation_space: Space
    action_space: Space
    rows: int
    """In one request, at most."""
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Server -> worker: what the policy gives. The descriptor of the mailbox comes with it, unless it is refused."""

    layout: MailboxLayout | None = None
    initial_states: Arrays = ()
    specs: WeightSpecs | None = None
    refusal: str = ""
    """Why this worker's rows do not fit; empty: they do."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """What one server accepts workers from."""

    local: socket.socket
    """For workers of this machine. Others may hold it, too, and keep it open when the server ends."""
    nodes: socket.socket | None = None
    """For workers of other nodes; None: there are none."""
    address: NodeAddress | None = None
    """Where both are found, with the key that workers of other nodes have to know."""

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return (self.local,) if self.nodes is None else (self.local, self.nodes)

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()


def listen() -> socket.socket:
    """A listening socket of this machine that no crash can leak: on Linux its address is no file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux":
        listener.bind("")  # the kernel chooses a free abstract address
    else:
        listener.bind(str(Path(tempfile.mkdtemp(prefix="cormorant-")) / "server"))
    listener.listen(_QUEUE)
    return listener


def listen_on(host: str) -> Listeners:
    """Listening sockets for workers on all nodes. `host`: address of this node's interface in the cluster.

    Raises:
        OSError: this node does not have that address.
    """
    local = listen()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    nodes = socket.create_server((host, 0), backlog=_QUEUE, family=family)
    address = NodeAddress(
        host=host,
        port=nodes.getsockname()[1],
        key=secrets.token_bytes(32),
        machine=this_machine(),
        local=local.getsockname(),
    )
    return Listeners(local, nodes, address)


def is_of_this_user(peer: socket.socket) -> bool:
    """Whether a process of this user is at the other end: abstract addresses have no permissions."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the address is a file in a folder of this user's
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(data)[1] == os.getuid())
