"""Two connected sockets that carry messages."""

import socket
from multiprocessing.connection import Connection


def socket_pair() -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())
