"""`cormorant status`: lines for a person, and a watch that outlives a head. `cormorant doctor`: objects of a cluster,
and the sentence that each trouble gets.
"""

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cormorant_cli.__main__ import run
from cormorant_cli.commands.doctor import Finding, of_job, of_operators
from cormorant_cli.commands.status import follow, lines_of
from cormorant_cli.commands.weights import write_whole
from cormorant_cli.connection import Connection
from cormorant_cli.errors import CommandFailed, NotReady
from cormorant_contract.rest.status import (
    Condition,
    EpisodeReport,
    GroupReport,
    QueueReport,
    Status,
    WeightsReport,
)
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead, job_status


def status(**changes: object) -> Status:
    counted = {"collected": 12_345, "target": 100_000, "per_second": 1234.4, "stepped": 12_400}
    groups = (GroupReport(name="cpu", desired=3, ready=2), GroupReport(name="gpu", desired=1, ready=1))
    known = {
        "frames": {**counted, "delivered": 0, "dropped": {}},
        "episodes": EpisodeReport(count=3, mean_return=-20.5, mean_length=900.0),
        "weights": WeightsReport(version=7, min_applied_version=6),
        "groups": groups,
        "restarts": 2,
        "queue": QueueReport(capacity=4, waiting=1, ready=1, lent=0, acked=0, redelivered=0, ended=False),
    }
    return Status.model_validate(job_status(**known | changes))


def test_status_says_what_is_waited_for_and_what_fills_the_queue() -> None:
    sentence = "waiting for a learner: no consumer has asked for batches yet"
    found = status(
        conditions=(
            Condition(type="Ready", status="True", reason="EnoughWorkers", message="2 of 2 workers are ready"),
            Condition(type="Progressing", status="False", reason="WaitingForConsumer", message=sentence),
            Condition(type="Paused", status="False", reason="NotPaused", message="the job is not paused"),
        ),
        queue=QueueReport(capacity=4, waiting=6, ready=1, lent=2, acked=0, redelivered=0, ended=False),
    )
    lines = list(lines_of(found))
    without = status(queue=QueueReport(capacity=0, waiting=0, ready=0, lent=0, acked=0, redelivered=0, ended=False))
    assert not any("queue" in line for line in lines_of(without)), "a dataset job has none"
    assert "  queue     4 of 4, 2 waiting for room, 1 returned, 2 with learners" in lines
    assert "  episodes  3, mean return -20.50 over the last 3" in lines
    assert lines[-2:] == ["  Ready: 2 of 2 workers are ready", f"  Progressing: {sentence}"]


def test_watch_goes_on_with_the_next_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cormorant_cli.connection.RECONNECT_S", 0.0)
    now: list[Status | None] = [None]

    def answer(_heard: Heard) -> Say:
        return Say(200, now[-1].model_dump_json().encode()) if now[-1] is not None else Say(breaks=True)

    with ScriptedHead(answer) as head:
        connection = Connection(url=head.url, token="t")
        with pytest.raises(NotReady, match="no head answers at"):
            next(follow(connection, 0.0))
        now.append(status())
        seen = follow(connection, 0.0)
        first, error = next(seen)
        assert (first.splitlines()[0], error) == ("pong: Running", "")
        assert "  restarts  2" in first.splitlines()
        now.append(None)
        for shown, error in (next(seen), next(seen)):
            assert shown == first
            assert "no head answers at" in error
        now.append(status(phase="Paused"))
        last, error = next(seen)
        assert (last.splitlines()[0], error) == ("pong: Paused", "")


def test_watch_on_a_terminal_ends_with_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cormorant_cli.commands.status.time", SimpleNamespace(sleep=interrupt))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ScriptedHead(lambda _heard: Say(200, status().model_dump_json().encode())) as head:
        assert run(["status", "--url", head.url, "--token", "t", "--watch"]) == 0
    drawn = capsys.readouterr().out
    assert "pong: Running" in drawn
    assert drawn.endswith("\x1b[?25h\x1b[?1049l"), "the terminal is as it was"


# -- doctor ----------------------------------------------------------------------------------------------------

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def make_operator(*, replicas: int = 1, ready: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"name": "cormorant", "namespace": "ops"},
        "spec": {"replicas": replicas},
        "status": {"readyReplicas": ready},
    }


def make_job(*conditions: str, status: Any = None, **metadata: Any) -> Any:
    """A job; a condition is written `Type=Status/Reason: message`."""
    facts = []
    for text in conditions:
        head, _, message = text.partition(": ")
        kind, _, rest = head.partition("=")
        state, _, reason = rest.partition("/")
        facts.append({"type": kind, "status": state, "reason": reason, "message": message})
    known = {"name": "pong", "namespace": "rl", "uid": "u", "generation": 1, "creationTimestamp": NOW.isoformat()}
    whole = {"observedGeneration": 1, "conditions": facts, **(status or {})}
    return {"metadata": {**known, **metadata}, "spec": {}, **({"status": whole} if status is not False else {})}


READY = make_job("Accepted=True/Accepted", "Ready=True/EnoughWorkers: 2 of 2 are ready", "Paused=False/NotPaused")


def said(findings: Any) -> list[str]:
    """`level sentence` of each finding."""
    return [f"{finding.level} {finding.sentence}" for finding in findings]


@pytest.mark.parametrize(
    ("operators", "sentence"),
    [
        ([make_operator()], "ok the operator ops/cormorant is running (1 of 1 replicas ready)"),
        ([], "problem the operator is not installed: no Deployment has the label"),
        ([make_operator(replicas=0, ready=0)], "problem the operator ops/cormorant is scaled to 0; kubectl -n"),
        ([make_operator(ready=0)], "problem the operator ops/cormorant is not running: no replica is ready; see"),
    ],
)
def test_operator_is_one_sentence(operators: list[Any], sentence: str) -> None:
    (found,) = said(of_operators(operators))
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (make_job(status=False), "problem no operator has reconciled rl/pong since its creation at 2026-01-02T00:00"),
        (make_job(generation=2), "problem the operator has not reconciled the newest spec of rl/pong"),
        (make_job("Completed=True/AllFramesDelivered: 5", generation=2), "ok Completed=True, AllFramesDelivered: 5"),
        (make_job(deletionTimestamp="2026-01-02T00:00:00Z"), "problem rl/pong is being deleted"),
        ("Accepted=False/Forbidden: pods is forbidden", "Forbidden: pods is forbidden; see rbac in the chart"),
        ("Accepted=True/UnknownFields: x", "note Accepted=True, UnknownFields: x"),
        ("Scheduled=False/ImagePull: no i", "problem Scheduled=False, ImagePull: no i; check the image's name"),
        ("Scheduled=False/QuotaExceeded: exceeded quota: q", "quota: q; raise the ResourceQuota"),
        ("Scheduled=False/PodsPending: 0 of 2", "note Scheduled=False, PodsPending: 0 of 2"),
        ("Progressing=Unknown/ControlPlaneUnreachable: silent", "silent; does a NetworkPolicy block it?"),
        ("Progressing=True/WaitingForConsumer: the queue is full", "note Progressing=True, WaitingForConsumer"),
        ("Stalled=True/NoProgress", "problem Stalled=True, NoProgress"),
        ("Suspended=True/Suspended", "problem Suspended=True, Suspended; set spec.suspend to false"),
        ("Paused=True/Spec: by spec", "note Paused=True, Spec: by spec; `cormorant resume` ends it"),
    ],
)
def test_operators_words_about_a_job_are_one_sentence(job: Any, sentence: str) -> None:
    (found,) = said(of_job(make_job(job) if isinstance(job, str) else job))
    assert sentence in found


def test_healthy_job_has_no_problem_and_no_noise() -> None:
    ready = "ok Ready=True, EnoughWorkers: 2 of 2 are ready"
    assert said(of_job(READY)) == ["ok Accepted=True, Accepted", ready]


def test_last_failure_is_a_note() -> None:
    failure = {"pod": "cpu-0", "reason": "OOMKilled", "time": NOW.isoformat(), "exitCode": 137, "message": "big"}
    (found,) = of_job(make_job(status={"recentFailures": [failure, failure]}))
    assert found == Finding(
        level="note",
        sentence="2 pods failed, most recently cpu-0 at 2026-01-02T00:00:00+00:00: OOMKilled, exit code 137: big",
    )


@pytest.mark.parametrize(
    ("answers", "problems"),
    [
        ({}, []),
        ({"deployments": 403}, []),
        ({"collectorjobs/pong": 404}, ["not so (/apis/cormorant.dev/v1alpha1/namespaces/rl/collectorjobs/pong)"]),
    ],
)
def test_trouble_beyond_the_operators_words_is_one_sentence(
    answers: dict[str, Any], problems: list[str], api_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    known: dict[str, Any] = {
        "deployments": {"items": [make_operator()], "metadata": {}},
        "collectorjobs/pong": READY,
        **answers,
        "version": {"gitVersion": "v1.34"},
    }

    def answer(heard: Heard) -> Say:
        path = heard.path.partition("?")[0]
        found = next((known[part] for part in known if path.endswith(part)), 404)
        if isinstance(found, int):
            return Say(found, json.dumps({"kind": "Status", "message": "not so"}).encode())
        return Say(200, json.dumps({"kind": "Any", **found}).encode())

    with api_server(answer):
        code = run(["doctor", "pong", "-o", "json"])
    document = json.loads(capsys.readouterr().out)
    found = [finding["sentence"] for finding in document["findings"] if finding["level"] == "problem"]
    assert (len(found), all(map(str.__contains__, found, problems))) == (len(problems), True), found
    assert (code, document["healthy"]) == (int(bool(problems)), not problems)
    gaps = [finding for finding in document["findings"] if "cannot check" in finding["sentence"]]
    assert len(gaps) == list(answers.values()).count(403)


@pytest.mark.parametrize("out", [".", "missing/report.html"])
def test_report_that_cannot_be_written_is_a_sentence(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandFailed, match=f"^cannot write {re.escape(out)}: "):
        write_whole(Path(out), memoryview(b"<html>"))
    assert list(tmp_path.iterdir()) == []
