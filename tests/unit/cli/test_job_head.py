"""A job's head through an API server that forwards ports, as a real one does: over a web socket for each connection."""

import gc
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

import cormorant
from cormorant_client import BadAddress, HeadUnreachable
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead

# The Kubernetes client leaves a web socket that the server closed to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

JOB = {"metadata": {"name": "pong", "namespace": "rl", "uid": "u"}, "spec": {}}
POD = {"metadata": {"name": "pong-head-1", "labels": {}}, "status": {"phase": "Running"}}
WEIGHTS = safetensors.numpy.save({"w": np.arange(500_000, dtype=np.float32)})


class ForwardingServer:
    """Has one job; a port of its head's pod is a port of this machine."""

    def __init__(self, port: int) -> None:
        self.pods: list[Any] = [POD]
        self.num_forwarded = 0
        self.answers = threading.Event()
        """Not set: a port-forward is not answered."""
        self.answers.set()
        self._port = port

    def answer(self, connection: ServerConnection, request: Any) -> Any:
        path = request.path.partition("?")[0]
        if path.endswith("/portforward"):
            self.answers.wait(30)
            return None
        document = {"items": self.pods, "metadata": {}} if path.endswith("/pods") else JOB
        return connection.respond(HTTPStatus.OK, json.dumps(document))

    def forward(self, connection: ServerConnection) -> None:
        self.num_forwarded += 1
        assert connection.request is not None
        port = int(connection.request.path.partition("ports=")[2])
        for channel in (b"\0", b"\1"):
            connection.send(channel + port.to_bytes(2, "little"))
        with socket.create_connection(("127.0.0.1", self._port)) as head, suppress(ConnectionClosed, OSError):
            threading.Thread(target=self._back, args=(head, connection), daemon=True).start()
            for message in connection:
                assert isinstance(message, bytes)
                head.sendall(message[1:])

    def _back(self, head: socket.socket, connection: ServerConnection) -> None:
        with suppress(ConnectionClosed, OSError):
            while data := head.recv(65536):
                connection.send(b"\0" + data)
            connection.close()


@pytest.fixture
def forwarding(kubeconfig: Callable[[str], None]) -> Any:
    @contextmanager
    def start(port: int) -> Iterator[ForwardingServer]:
        made = ForwardingServer(port)
        server: Server
        with serve(
            made.forward,
            "127.0.0.1",
            0,
            process_request=made.answer,
            subprotocols=["v4.channel.k8s.io"],  # type: ignore[list-item]
            close_timeout=0.2,  # the Kubernetes client answers no closing handshake
        ) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            kubeconfig(f"http://127.0.0.1:{server.socket.getsockname()[1]}")
            yield made
        for thread in threading.enumerate():
            if "port" in thread.name:  # its web socket belongs to this test
                thread.join(30)
        gc.collect()

    return start


def answer(heard: Heard) -> Say:
    assert heard.headers["authorization"] == "Bearer mine"
    assert heard.headers["host"] == "pong-api.rl.svc:8000"
    if heard.path == "/v1/models":
        return Say(body=b'{"models": [], "version": 5}')
    return Say(body=WEIGHTS) if heard.path.endswith("/weights") else Say(404)


def test_a_jobs_head_is_reached_through_the_api_server(forwarding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.excepthook
    with ScriptedHead(answer) as head, forwarding(head.port) as server:
        with cormorant.connect("pong", token="mine") as client:
            assert client.models().version == 5
            assert client.weights().numpy()["w"].tolist() == list(range(500_000))
            assert server.num_forwarded == 1, "the connection is used again"
            (shard,) = pickle.loads(pickle.dumps(client.streaming_split(1)))  # our own
            with shard.connect() as other:  # as another process does
                assert other.models().version == 5
            assert server.num_forwarded == 2
        assert threading.excepthook is before
        with cormorant.connect("pong", token="mine"):
            monkeypatch.setattr(threading, "excepthook", print)
        assert threading.excepthook is print, "another one that was set in the meantime stays"
        with pytest.raises(HeadUnreachable, match="the client is closed"):
            client.models()


def test_a_port_forward_that_is_not_answered_ends_in_time(forwarding: Any) -> None:
    with ScriptedHead(answer) as head, forwarding(head.port) as server:
        server.answers.clear()
        with (
            cormorant.connect("pong", token="mine", timeout_s=0.3, reconnect_s=0) as client,
            pytest.raises(HeadUnreachable, match="does not answer: no answer in time"),
        ):
            client.models()
        server.answers.set()


def test_a_head_that_goes_is_told_and_its_successor_is_found(forwarding: Any) -> None:
    def close(heard: Heard) -> Say:
        return Say(body=answer(heard).body, headers={"Connection": "close"})

    with (
        ScriptedHead(close) as head,
        forwarding(head.port) as server,
        cormorant.connect("pong", token="mine", reconnect_s=0.2) as client,
    ):
        assert client.models().version == 5
        server.pods = []
        with pytest.raises(HeadUnreachable, match="rl/pong has no head: no operator has reconciled the job yet"):
            client.models()
        with pytest.raises(BadAddress, match="rl/pong has no head"):
            cormorant.connect("pong", token="mine")
        server.pods = [POD]
        assert client.models().version == 5
