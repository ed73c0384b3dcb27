"""A forwarded port, with a real server at its other end: what is sent arrives, and both ends end together."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from cormorant_cli.errors import ClusterFailed
from cormorant_cli.forward import Forwarder, forwarded

WAIT_S = 10.0


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(65536):
            if data == b"bye":
                return
            self.request.sendall(data)


@pytest.fixture
def forwarder() -> Iterator[Forwarder]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=partial(server.serve_forever, 0.02), daemon=True).start()
        with forwarded(lambda: socket.create_connection(server.server_address, WAIT_S)) as found:
            yield found
        server.shutdown()


def dial(forwarder: Forwarder) -> socket.socket:
    return socket.create_connection(("127.0.0.1", forwarder.port), WAIT_S)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data


def test_bytes_go_both_ways_on_several_connections(forwarder: Forwarder) -> None:
    with dial(forwarder) as one, dial(forwarder) as two:
        payload = bytes(range(256)) * 4096
        sender = threading.Thread(target=one.sendall, args=(payload,))
        sender.start()
        two.sendall(b"two")
        assert receive(two, 3) == b"two"
        assert receive(one, len(payload)) == payload
        sender.join(WAIT_S)


def test_end_of_the_pod_is_the_end_of_the_client(forwarder: Forwarder) -> None:
    with dial(forwarder) as connection:
        connection.sendall(b"bye")
        assert connection.recv(1) == b""


def test_closing_ends_what_is_open_and_can_be_done_twice(forwarder: Forwarder) -> None:
    with dial(forwarder) as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        forwarder.close()
        forwarder.close()
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        dial(forwarder)


def test_failed_connection_is_closed_and_its_reason_kept() -> None:
    def refuse() -> socket.socket:
        raise ClusterFailed("no way there")

    with forwarded(refuse) as forwarder, dial(forwarder) as connection:
        assert connection.recv(1) == b""
        assert forwarder.error == "no way there"


def test_thread_hook_is_restored() -> None:
    before = threading.excepthook
    with forwarded(socket.socket):
        assert threading.excepthook is not before
    assert threading.excepthook is before
