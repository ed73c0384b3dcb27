"""Which head is meant, and whose token goes there."""

from typing import cast

import pytest

from cormorant_cli.__main__ import run
from cormorant_cli.cluster import Cluster, Raw
from cormorant_cli.connection import Connection, head_pod
from cormorant_cli.errors import BadInput, NoHead

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


class NoPods:
    """A cluster in which a job's pods are gone."""

    def objects(self, *_: object, **__: object) -> list[Raw]:
        return []

    def options_of(self, job: Raw) -> str:
        return ""


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({"phase": "Running"}, "has no head: its last status says Running; see `cormorant doctor score`"),
        ({}, "has no head: no operator has reconciled the job yet; see `cormorant doctor score`"),
        (
            {"conditions": [{"type": "Completed", "status": "True"}]},
            "no longer has a head: the job is Completed; its results are in file:///data/score",
        ),
    ],
)
def test_job_without_a_head_is_not_said_to_run(status: Raw, sentence: str) -> None:
    spec = {"output": {"dataset": {"uri": "file:///data/score"}}}
    job = {"metadata": {"name": "score", "namespace": "rl", "uid": "1"}, "spec": spec, "status": status}
    with pytest.raises(NoHead) as error:
        head_pod(cast(Cluster, NoPods()), job)
    assert str(error.value) == f"rl/score {sentence}"
