"""An API server on a real socket: what it may answer besides an object; which head is meant, and whose token it gets;
connections to a head by forwarded ports, each a web socket, as a real server has them.
"""

import base64
import gc
import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

import cormorant
from cormorant_cli.__main__ import run
from cormorant_cli.cluster import Raw
from cormorant_cli.connection import head_pod
from cormorant_cli.errors import NotReady
from cormorant_cli.printing import told_when_slow
from cormorant_client import BadAddress, HeadUnreachable
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead


def refusal(status: int, **members: object) -> Say:
    return Say(status, json.dumps({"kind": "Status", "status": "Failure", **members}).encode())


@pytest.mark.parametrize(
    ("said", "code", "sentence"),
    [
        (refusal(401, message="Unauthorized"), 1, "does not accept the credentials of context here"),
        (refusal(403, message="User ann cannot list jobs"), 1, "permission denied: User ann cannot list jobs; ask the"),
        (refusal(422, message="spec.env is fixed"), 2, "the API server rejected the request: spec.env is fixed"),
        (refusal(500, message="etcdserver: no leader"), 1, "with 500: etcdserver: no leader"),
        (Say(502, b"<html>Bad Gateway</html>"), 1, "with 502: <html>Bad Gateway</html>"),
        (Say(200, b"<html>Log in</html>"), 1, "did not answer as an API server does: <html>Log in</html>"),
        (Say(200, b'{"ok": true}'), 1, "did not answer as an API server does: no object"),
        (Say(404, b"<html>No such page</html>"), 1, "did not answer as an API server does: <html>No such page</html>"),
        (Say(404, b"404 page not found"), 1, "CollectorJob is not installed in the cluster at"),
        (Say(breaks=True), 1, "of context here does not answer"),
    ],
)
def test_refusals_are_sentences(
    said: Say, code: int, sentence: str, api_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with api_server(lambda _heard: said):
        assert run(["status", "pong"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "contexts: 5", "apiVersion: v1\nkind: Config\n"])
def test_kubeconfig_that_is_none_is_a_sentence(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr("cormorant_cli.cluster._NAMESPACE", tmp_path)  # in a pod, too: its own cluster is not meant
    assert run(["status", "pong"]) == 2
    assert "kubeconfig" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["pause"], ["resume"], ["status"], ["weights", "list"], ["weights", "pull", "f"], ["state", "save", "f"]],
)
def test_every_command_takes_a_job_or_a_url(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CORMORANT_URL", raising=False)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert run(command) == 2
    assert "no job or head given" in capsys.readouterr().err
    assert run([*command, "pong", "-n", "rl"]) == 2
    assert "no kubeconfig found that names a cluster" in capsys.readouterr().err


NO_PODS: Any = SimpleNamespace(objects=lambda *_, **__: [], options_of=lambda _job: "")
"""A cluster in which a job's pods are gone."""


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({"phase": "Running"}, "has no head: its last status says Running; see `cormorant doctor score`"),
        ({}, "has no head: no operator has reconciled the job yet; see `cormorant doctor score`"),
        ({"conditions": [{"type": "Completed", "status": "True"}]}, "no longer has a head: the job is Completed"),
    ],
)
def test_job_without_a_head_is_not_said_to_run(status: Raw, sentence: str) -> None:
    job = {"metadata": {"name": "score", "namespace": "rl", "uid": "1"}, "spec": {}, "status": status}
    with pytest.raises(NotReady) as error:
        head_pod(NO_PODS, job)
    assert str(error.value) == f"rl/score {sentence}"


@pytest.mark.parametrize(
    ("command", "options", "word"), [("pause", "", "true"), ("pause", " -n rl", "true"), ("resume", " -n rl", "false")]
)
def test_pause_without_a_lease_is_written_to_the_spec(
    command: str, options: str, word: str, api_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = json.dumps({"kind": "CollectorJob", "metadata": {"name": "pong", "namespace": "rl", "uid": "1"}}).encode()
    with api_server(lambda _heard: Say(200, job)) as server:
        assert run([command, "pong", *options.split()]) == 0
        (heard,) = server.heard
    # With the namespace and the token of the context.
    assert heard.path.partition("?")[0] == "/apis/cormorant.dev/v1alpha1/namespaces/rl/collectorjobs/pong"
    assert heard.headers["authorization"] == "Bearer t"
    assert (heard.method, json.loads(heard.body)) == ("PATCH", {"spec": {"paused": command == "pause"}})
    said = f"rl/pong: spec.paused is {word}; `cormorant status pong` shows when its workers "
    assert capsys.readouterr().out.startswith(said)


def test_only_slow_waits_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with told_when_slow("until pigs fly", after_s=600):
        pass
    said = ""
    with told_when_slow("until the workers are paused, at most 30 s", after_s=0):
        while not said:
            said = capsys.readouterr().err
            time.sleep(0.01)
    assert said == "waiting until the workers are paused, at most 30 s\n"


# The Kubernetes client leaves a web socket that the server closed to the garbage collector.
forwards = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

JOB = {"metadata": {"name": "pong", "namespace": "rl", "uid": "u"}, "spec": {}}
POD = {"metadata": {"name": "pong-head-1", "labels": {}}, "status": {"phase": "Running"}}
WEIGHTS = safetensors.numpy.save({"w": np.arange(500_000, dtype=np.float32)})


class ForwardingServer:
    """Has one job; a port of its head's pod is a port of this machine."""

    def __init__(self, port: int) -> None:
        self.pods: list[Any] = [POD]
        self.num_forwarded = self.num_secrets_read = 0
        self.answers = threading.Event()
        """Not set: a port-forward is not answered."""
        self.answers.set()
        self._port = port

    def answer(self, connection: ServerConnection, request: Any) -> Any:
        path = request.path.partition("?")[0]
        if path.endswith("/portforward"):
            self.answers.wait(30)
            return None
        document: Any = {"items": self.pods, "metadata": {}} if path.endswith("/pods") else JOB
        if "/secrets/" in path:
            self.num_secrets_read += 1
            document = {"data": {"write": base64.b64encode(b"mine").decode()}}
        return connection.respond(HTTPStatus.OK, json.dumps({"kind": "Any", **document}))

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


@forwards
def test_a_jobs_head_is_reached_through_the_api_server(forwarding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.excepthook
    with ScriptedHead(answer) as head, forwarding(head.server_port) as server:
        with cormorant.connect("pong") as client:
            assert client.models().version == 5
            assert client.weights().numpy()["w"].tolist() == list(range(500_000))
            assert server.num_forwarded == 1, "the connection is used again"
            (shard,) = pickle.loads(pickle.dumps(client.streaming_split(1)))  # our own
            with shard.connect() as other:  # as another process does
                assert other.models().version == 5
            assert server.num_forwarded == 2
            assert server.num_secrets_read == 1, "who gets the shard may not be allowed to read Secrets"
        assert threading.excepthook is before
        with cormorant.connect("pong", token="mine"):
            monkeypatch.setattr(threading, "excepthook", print)
        assert threading.excepthook is print, "another one that was set in the meantime stays"
        with pytest.raises(HeadUnreachable, match="the client is closed"):
            client.models()


@forwards
def test_an_empty_token_file_does_not_mean_the_jobs_secret(forwarding: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "token"
    file.touch()
    with forwarding(9) as server:
        with pytest.raises(BadAddress, match=r"the token file .* is empty"):
            cormorant.connect("pong", token_file=file)
        assert run(["status", "pong", "--token-file", str(file)]) == 2
        assert "is empty" in capsys.readouterr().err
        assert server.num_secrets_read == 0


@forwards
def test_a_port_forward_that_is_not_answered_ends_in_time(forwarding: Any) -> None:
    with ScriptedHead(answer) as head, forwarding(head.server_port) as server:
        server.answers.clear()
        with (
            cormorant.connect("pong", token="mine", timeout_s=0.3, reconnect_s=0) as client,
            pytest.raises(HeadUnreachable, match="does not answer: no answer in time"),
        ):
            client.models()
        server.answers.set()


@forwards
def test_a_head_that_goes_is_told_and_its_successor_is_found(forwarding: Any) -> None:
    def close(heard: Heard) -> Say:
        return Say(body=answer(heard).body, headers={"Connection": "close"})

    with (
        ScriptedHead(close) as head,
        forwarding(head.server_port) as server,
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
