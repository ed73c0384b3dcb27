"""Which head is meant, and whose token goes there."""

import pytest

from cormorant_cli.__main__ import run
from cormorant_cli.connection import Connection
from cormorant_cli.errors import BadInput

HERE = "http://127.0.0.1:8000"


def connection(**given: str) -> Connection:
    return Connection(**{"url": "", "token": "", "token_file": "", **given})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "no job or head given"),
        ({"job": "pong", "url": HERE}, f'"pong" names a job of the cluster and --url {HERE} a head'),
        ({"url": HERE, "namespace": "rl"}, "--namespace and --context need a job's name"),
        ({"url": HERE, "context": "kind"}, "--namespace and --context need a job's name"),
    ],
)
def test_contradictions_are_refused(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        connection(**given)


def test_job_is_meant_where_only_the_environment_names_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORMORANT_URL", HERE)
    assert connection(job="pong", url=HERE).job == "pong"


@pytest.mark.parametrize(
    "command",
    [
        ["pause"],
        ["resume"],
        ["status"],
        ["weights", "list"],
        ["weights", "push", "f"],
        ["state", "save", "f"],
        ["annotations", "get", "key"],
        ["batches", "tail"],
    ],
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
