"""Jobs of a cluster as `cormorant top` shows them, before an API server on a real socket."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from cormorant_cli import census as census_module
from cormorant_cli import sources
from cormorant_cli.__main__ import run
from cormorant_cli.census import MOST_HEADS, Asking, Census, Scope, read_written
from cormorant_cli.cluster import connected
from cormorant_cli.errors import HeadAway
from cormorant_cli.top_table import lines_of, rows_of
from cormorant_testing.scripted_head import Heard, Say, scripted

NOW = datetime.now(UTC).replace(microsecond=0)
WAIT_S = 10.0


def make_job(name: str = "pong", *, age_s: float = 5, generation: int = 1, **status: Any) -> dict[str, Any]:
    """A job as the API server sends it, whose status was written some seconds before NOW."""
    known: dict[str, Any] = {
        "phase": "Running",
        "observedGeneration": 1,
        "workers": "2/3",
        "frames": {"collected": 500, "target": 1000, "perSecond": 80.4},
        "weights": {"version": 7, "minAppliedVersion": 5},
        "groups": [{"name": "cpu", "desired": 3, "ready": 2, "restarts": 1}],
        "headRestarts": 1,
        "conditions": [],
    }
    moment = (NOW - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = [
        {"manager": "cormorant-cli", "time": "2026-04-01T00:00:00Z"},
        {"manager": "cormorant-operator", "subresource": "status", "time": moment},
    ]
    metadata = {"name": name, "namespace": "rl", "uid": f"uid-{name}", "generation": generation}
    return {"metadata": {**metadata, "managedFields": fields}, "status": {**known, **status}}


def fact(kind: str, status: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "Because", "message": message}


def listing(*jobs: dict[str, Any]) -> Say:
    body = {"apiVersion": "cormorant.dev/v1alpha1", "kind": "List", "metadata": {}, "items": list(jobs)}
    return Say(200, json.dumps(body).encode())


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """An API server that answers as it is told; KUBECONFIG leads there."""
    # Its answers have the hour of this moment, and a run of all tests takes longer than a status stays fresh.
    monkeypatch.setitem(globals(), "NOW", datetime.now(UTC).replace(microsecond=0))

    @contextmanager
    def start(answer: Callable[[Heard], Say]) -> Iterator[Any]:
        with scripted(answer) as server:
            document = {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "rl"}}],
                "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
            (tmp_path / "config").write_text(yaml.safe_dump(document))
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
            yield server

    monkeypatch.delenv("CORMORANT_URL", raising=False)
    return start


def row(job: dict[str, Any]) -> str:
    from cormorant_cli.sources import Entry

    entry = Entry(name=job["metadata"]["name"], written=read_written(job, now=NOW), is_asked=True)
    return " ".join(lines_of(tuple(rows_of([entry])))[1].split())


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (make_job(), "pong Running 80 500 (50%) 2/3 7 2 5s 2 restarts"),
        (make_job(age_s=61), "pong Running 80 500 (50%) 2/3 7 2 61s its status is too old: is the operator running"),
        (make_job(age_s=9000, phase="Paused", frames={"collected": 5}), "pong Paused 0 5 2/3 7 2 2h30m 2 restarts"),
        (make_job(conditions=[fact("Failed", "True", "no room")], phase="Failed"), "5s no room; 2 restarts"),
        (make_job(conditions=[fact("Ready", "False", "one is late")], phase="Degraded"), "5s one is late; 2 restarts"),
        (make_job(conditions=[fact("Ready", "False", "one is late")]), "5s 2 restarts"),
        (make_job(conditions=[fact("Progressing", "Unknown", "its head is away")]), "5s its head is away; 2 restarts"),
        (make_job(generation=2), "the operator has not reconciled its newest spec; 2 restarts"),
    ],
)
def test_what_the_operator_wrote_is_a_row(job: dict[str, Any], line: str) -> None:
    assert line in row(job)


def test_job_that_no_operator_saw_says_so() -> None:
    job = {**make_job(), "status": {}}
    assert row(job) == "pong - not reconciled by any operator; see `cormorant doctor pong`"


def test_all_jobs_of_a_namespace_are_one_request(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended = make_job("a", phase="Completed", conditions=[fact("Completed", "True", "")], frames={"collected": 9})
    old = make_job("c", age_s=600)
    with serve(lambda _heard: listing(ended, make_job("b"), old)) as server:
        assert run(["top"]) == 0
        (heard,) = server.heard
    assert heard.path.split("?")[0] == "/apis/cormorant.dev/v1alpha1/namespaces/rl/collectorjobs"
    heading, *rows, total = capsys.readouterr().out.splitlines()
    assert heading.split() == ["JOB", "PHASE", "FRAMES/S", "FRAMES", "WORKERS", "VERSION", "BEHIND", "AS", "OF", "NOTE"]
    assert [line.split()[0] for line in rows] == ["b", "c", "a"], "those that ended stand below"
    # The last words of c, ten minutes old, are no rate of now.
    assert total.split() == ["3", "jobs", "1", "moving", "80", "1,009", "6/9"]


def test_json_has_what_the_operator_wrote_and_its_age(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda _heard: listing(make_job())):
        assert run(["top", "-A", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (found["name"], found["namespace"], found["status"], found["error"]) == ("rl/pong", "rl", None, "")
    assert found["reported"]["frames"]["collected"] == 500
    assert 5 <= found["reported_age_s"] < 5 + WAIT_S


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there are no jobs in namespace rl; -A shows those of all namespaces\n"),
        (["-n", "x"], "there are no jobs in namespace x; -A shows those of all namespaces\n"),
        (["-A"], "there are no jobs in the cluster\n"),
    ],
)
def test_no_jobs_is_a_sentence(
    arguments: list[str], sentence: str, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(lambda _heard: listing()):
        assert run(["top", *arguments]) == 0
    assert tuple(capsys.readouterr()) == ("", sentence)


@pytest.mark.parametrize("arguments", [[], ["pong"]])
def test_forbidden_is_a_sentence(arguments: list[str], serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = {"kind": "Status", "message": 'User "ann" cannot list resource "collectorjobs"'}
    with serve(lambda _heard: Say(403, json.dumps(said).encode())):
        assert run(["top", *arguments]) == 1
    assert 'permission denied: User "ann" cannot list' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "variable", "sentence"),
    [
        ([], "", "or name a head with --url"),
        (["-n", "rl"], "http://127.0.0.1:9", "no kubeconfig found"),
        (["pong"], "http://127.0.0.1:9", "no kubeconfig found"),
        (["pong", "--url", "http://127.0.0.1:9"], "", "--url names a head outside a cluster"),
        (["pong", "-A"], "", "remove the names"),
        (["pong", "--token-file", "a", "--token-file", "b"], "", "2 token files for jobs of a cluster"),
    ],
)
def test_cluster_or_head_is_what_the_user_wrote(
    arguments: list[str],
    variable: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.setenv("CORMORANT_URL", variable)
    assert run(["top", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_environment_alone_names_a_head(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CORMORANT_URL", "ftp://gone")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert run(["top"]) == 1
    assert "ftp://gone  Unreachable" in capsys.readouterr().out


# -- heads ---------------------------------------------------------------------------------------------------------


class Doors:
    """Ways to heads that are all shut; counts who knocks at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = self.most = 0
        self.opened = threading.Event()

    @contextmanager
    def open_head(self, _job: Any) -> Iterator[Any]:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.opened.wait(WAIT_S)
        with self._lock:
            self.inside -= 1
        raise HeadAway("no way there")
        yield


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_heads_are_asked_a_few_at_a_time_and_the_others_say_so(serve: Any) -> None:
    doors = Doors()
    jobs = [make_job(f"job-{i}") for i in range(MOST_HEADS + 2)]
    with serve(lambda _heard: listing(*jobs)), connected() as cluster:
        asking = Asking(open_head=doors.open_head, workers=True)
        census = Census(cluster, Scope(namespace="rl"), asking=asking, interval_s=0)
        until(lambda: doors.inside == MOST_HEADS)
        late = census.wait(0.05)
        doors.opened.set()
        entries = census.wait(WAIT_S)
        census.close()
    assert doors.most == MOST_HEADS
    assert [entry.error for entry in late[:MOST_HEADS]] == ["no answer from its head within 0.05 s"] * MOST_HEADS
    assert [entry.error for entry in entries[:MOST_HEADS]] == ["no way there"] * MOST_HEADS
    assert all("at most 8 heads are asked at a time" in entry.error for entry in entries[MOST_HEADS:])
    assert all(line.split()[1] == "Running" for line in lines_of(tuple(rows_of(entries)))[1:-1]), "the operator's word"


def test_connection_to_a_head_is_reused_and_reopened(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "RETRY_S", 0.01)
    answers, opened = ["first", "second", "broken", "third"], []

    class Client:
        def status(self) -> Any:
            word = answers[0] if len(answers) == 1 else answers.pop(0)
            if word == "broken":
                raise HeadAway("it broke")
            return word

    @contextmanager
    def open_head(job: Any) -> Iterator[Any]:
        opened.append(job["metadata"]["name"])
        yield Client()

    heard: list[object] = []

    def is_there() -> bool:
        (entry,) = census.entries()
        heard.append(entry.error or (entry.reading.status if entry.reading is not None else ""))
        return heard[-1] == "third"

    with serve(lambda _heard: listing(make_job())), connected() as cluster:
        asking = Asking(open_head=open_head, workers=False)
        census = Census(cluster, Scope(namespace="rl"), asking=asking, interval_s=0.05)
        until(is_there)
        census.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name == "top-head"]
    assert opened == ["pong", "pong"]
    assert [word for word in dict.fromkeys(heard) if word] == ["first", "second", "it broke", "third"]


def test_slot_of_a_job_that_ended_goes_to_the_next(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census_module, "LIST_S", 0.01)
    monkeypatch.setattr(census_module, "MOST_HEADS", 1)
    is_over = threading.Event()

    @contextmanager
    def open_head(_job: Any) -> Iterator[Any]:
        raise HeadAway("no way there")
        yield

    def answer(_heard: Heard) -> Say:
        over = {"phase": "Completed", "conditions": [fact("Completed", "True", "")]} if is_over.is_set() else {}
        return listing(make_job("a", **over), make_job("b"))

    def errors() -> dict[str, str]:
        return {entry.name: entry.error for entry in census.entries()}

    with serve(answer), connected() as cluster:
        asking = Asking(open_head=open_head, workers=False)
        census = Census(cluster, Scope(namespace="rl"), asking=asking, interval_s=0.01)
        until(lambda: errors()["a"] == "no way there" and "not asked" in errors()["b"])
        is_over.set()
        until(lambda: errors() == {"a": "", "b": "no way there"})
        census.close()


def test_ended_and_unseen_jobs_are_not_asked(serve: Any) -> None:
    doors = Doors()
    doors.opened.set()
    ended = make_job("a", phase="Failed", conditions=[fact("Failed", "True", "no room")])
    with serve(lambda _heard: listing(ended, {**make_job("b"), "status": {}})), connected() as cluster:
        asking = Asking(open_head=doors.open_head, workers=False)
        census = Census(cluster, Scope(namespace="rl"), asking=asking, interval_s=0)
        entries = census.wait(WAIT_S)
        census.close()
    assert (doors.most, [entry.error for entry in entries]) == (0, ["", ""])


def test_list_goes_on_and_tells_when_it_cannot(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census_module, "LIST_S", 0.01)
    said = [listing(make_job("first")), listing(make_job("second"))]
    away = Say(500, b'{"message": "etcd is away"}')
    gate = threading.Event()

    def answer(_heard: Heard) -> Say:
        if len(said) > 1:
            return said.pop(0)
        return away if gate.is_set() else said[0]

    with serve(answer), connected() as cluster:
        census = Census(cluster, Scope(namespace="rl"), asking=None, interval_s=0.01)
        until(lambda: [entry.name for entry in census.entries()] == ["second"])
        gate.set()
        until(lambda: "etcd is away" in census.notice)
        kept = census.entries()
        census.close()
    assert [entry.name for entry in kept] == ["second"], "the last list stays"


def test_deleted_job_keeps_its_line_unknown_one_is_refused(
    serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(census_module, "LIST_S", 0.01)
    gone = threading.Event()
    missing = Say(404, b'{"message": "collectorjobs.cormorant.dev \\"pong\\" not found"}')

    def answer(heard: Heard) -> Say:
        if not heard.path.partition("?")[0].endswith("/pong"):
            return listing()
        return missing if gone.is_set() else Say(200, json.dumps(make_job()).encode())

    with serve(answer), connected() as cluster:
        census = Census(cluster, Scope(namespace="rl", names=("pong",)), asking=None, interval_s=0.01)
        gone.set()
        until(lambda: 'CollectorJob "pong" not found' in census.entries()[0].error)
        census.close()
        assert run(["top", "pong"]) == 1
    assert 'CollectorJob "pong" not found in namespace rl' in capsys.readouterr().err
