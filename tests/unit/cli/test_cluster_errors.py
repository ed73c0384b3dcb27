"""What an API server may answer besides an object, on a real socket: each is a sentence and an exit code."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from cormorant_cli.__main__ import run
from cormorant_testing.scripted_head import Say


def refusal(status: int, **members: object) -> Say:
    return Say(status, json.dumps({"kind": "Status", "status": "Failure", **members}).encode())


@pytest.mark.parametrize(
    ("said", "code", "sentence"),
    [
        (refusal(401, message="Unauthorized"), 1, "does not accept the credentials of context here"),
        (refusal(403, message="User ann cannot list jobs"), 1, "permission denied: User ann cannot list jobs; ask the"),
        (refusal(422, message="spec.env is fixed"), 2, "the API server rejected the request: spec.env is fixed"),
        (refusal(429, message="too many requests"), 1, "is busy: too many requests; try again"),
        (refusal(500, message="etcdserver: no leader"), 1, "with 500: etcdserver: no leader"),
        (Say(502, b"<html>Bad Gateway</html>"), 1, "with 502: <html>Bad Gateway</html>"),
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


def test_token_and_namespace_of_the_context_are_used(api_server: Any) -> None:
    job = {"metadata": {"name": "pong", "namespace": "rl"}}
    with api_server(lambda _heard: Say(200, json.dumps(job).encode())) as server:
        assert run(["pause", "pong"]) == 0
        (heard,) = server.heard
    assert heard.path.partition("?")[0] == "/apis/cormorant.dev/v1alpha1/namespaces/rl/collectorjobs/pong"
    assert heard.headers["authorization"] == "Bearer t"


def test_server_that_is_not_there_is_a_sentence(kubeconfig: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    kubeconfig(f"http://127.0.0.1:{port}")
    assert run(["status", "pong"]) == 1
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port} of context here does not answer" in said
    assert "refused" in said
    assert "object at 0x" not in said


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
