"""Handshake of a worker and an inference server: one Greeting, one Welcome with the mailbox's descriptor.

Each server process listens at its own address and reports it to the fleet, which tells the workers. A worker whose
server is gone tries the other known servers until it is assigned another one.
"""

import os
import secrets
import socket
import struct
from dataclasses import dataclass

from cormorant_worker.inference.address import ServerAddress, this_machine
from cormorant_worker.inference.mailbox import MailboxLayout
from cormorant_worker.spaces import Arrays, Space
from cormorant_worker.weights.staged import WeightSpecs

_QUEUE = 1024
"""Workers that wait to be accepted."""
_PEER = struct.Struct("=iII")


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
    """The listening sockets of one server."""

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


def is_of_this_user(peer: socket.socket) -> bool:
    """Whether the other end is a process of this user: abstract addresses have no permissions."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(data)[1] == os.getuid())
