"""Traces of a head, as an OTLP endpoint receives them: real workers, real HTTP, the SDK's own exporter.

CORMORANT_COLLECTOR, the command line of an OpenTelemetry collector, puts it between the head and the endpoint.
"""

import gzip
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cormorant_api.errors import HeadFault
from cormorant_api.head import open_traces
from cormorant_contract.rest.updates import UpdateTimings, WorkerCounts
from cormorant_testing.collecting import make_job
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead
from cormorant_testing.scripts import Server, unused_port
from cormorant_testing.serving import serve, weights_file
from cormorant_worker.errors import FleetError

VARIABLE = "CORMORANT_COLLECTOR"
"""`{address}`, where it receives OTLP over HTTP, and `{endpoint}`, where it exports to, are filled in."""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Receives OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self._server = ScriptedHead(self._receive)
        self.url = self._server.url

    def _receive(self, heard: Heard) -> Say:
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(heard.body) if "content-encoding" in heard.headers else heard.body)
        for of_resource in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in of_resource.resource.attributes})
            for scope in of_resource.scope_spans:
                self.spans.extend(scope.spans)
        return Say(body=b"")

    def close(self) -> None:
        self._server.close()

    def flush(self) -> None:
        """Until everything that was exported has arrived."""

    def trees(self, name: str) -> list[tuple[Any, dict[str, list[Any]]]]:
        """Roots of this name, each with its descendants by name."""
        found = []
        for root in (span for span in self.spans if span.name == name):
            below: dict[str, list[Any]] = {}
            parents = {root.span_id}
            for _ in range(2):
                for span in self.spans:
                    if span.parent_span_id in parents and span.span_id not in parents:
                        below.setdefault(span.name, []).append(span)
                        parents.add(span.span_id)
            found.append((root, below))
        return found


class RealCollector(Collector):
    """Receives what an OpenTelemetry collector has received, batched and exported again."""

    def __init__(self) -> None:
        super().__init__()
        address, endpoint = f"127.0.0.1:{unused_port()}", self.url
        command = shlex.split(os.environ[VARIABLE].format(address=address, endpoint=endpoint))
        self.url = f"http://{address}"
        self._server = Server(command, self.url)

    def flush(self) -> None:
        assert self._server.end() == 0, self._server.text

    def close(self) -> None:
        self._server.__exit__()
        super().close()


@pytest.fixture(params=["direct", "real"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    if request.param == "real" and not os.environ.get(VARIABLE):
        pytest.skip(f"no OpenTelemetry collector: {VARIABLE} names its command line (CONTRIBUTING.md)")
    collector = Collector() if request.param == "direct" else RealCollector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield collector
    collector.close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_publishes_and_rounds_are_traced(collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FleetError("no memory")

    job = make_job(num_envs=2, policy="versioned", action="box", collection={"framesPerBatch": 16, "totalFrames": 160})
    given = []
    with serve(job, directory=tmp_path / "head", workers=2) as served:
        with monkeypatch.context() as broken:
            broken.setattr(served.fleet, "publish", refuse)
            assert served.writer.put("/v1/models/policy/weights", weights_file(2.0)).kind == "fleet-failed"
        # Workers act with it from their next batch on.
        reply = served.writer.put("/v1/models/policy/weights", weights_file(1.0), traceparent=PARENT)
        assert reply.status in (200, 202), reply
        while (batch := served.reader.get("/v1/batches/next?consumer=learner&wait=10")).status == 200:
            given.append(batch.headers.get("traceparent", ""))
            served.reader.ack(batch)
    collector.flush()
    assert collector.resources[0]["service.name"] == "cormorant-head"
    assert collector.resources[0]["cormorant.job"] == job.metadata.name

    (refused, _), (publish, below) = sorted(collector.trees("publish"), key=lambda tree: tree[0].start_time_unix_nano)
    assert (refused.status.message, attributes(refused)["cormorant.version"]) == ("no memory", 1)
    assert (publish.trace_id.hex(), publish.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert attributes(publish)["cormorant.version"] == 1
    assert {name: len(spans) for name, spans in below.items()} == {
        "receive": 1, "verify": 1, "store": 1, "distribute": 1, "apply": 2,
    }  # fmt: skip
    assert {attributes(span)["cormorant.worker"] for span in below["apply"]} == {"cpu-0", "cpu-1"}

    rounds = collector.trees("round")
    assert len(rounds) == len(given) == 10
    for root, parts in rounds:
        assert {name: len(spans) for name, spans in parts.items()} == {
            "ticket": 1, "collect": 1, "seal": 1, "queue": 1, "deliver": 1, "acknowledge": 1,
        }  # fmt: skip
        assert attributes(root)["cormorant.frames"] == 16
        assert attributes(root)["cormorant.end"] == "acknowledged"
        order = [parts[name][0] for name in ("ticket", "seal", "queue", "deliver", "acknowledge")]
        assert order == sorted(order, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
        assert root.start_time_unix_nano == order[0].start_time_unix_nano
        assert parts["collect"][0].parent_span_id == parts["ticket"][0].span_id
    assert {text.split("-")[1] for text in given} == {root.trace_id.hex() for root, _ in rounds}
    links = [link.trace_id.hex() for root, _ in rounds for link in root.links]
    assert links
    assert set(links) == {PARENT.split("-")[1]}


def test_an_absent_collector_delays_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # longer than a test may take
    job = make_job(num_envs=2, collection={"framesPerBatch": 16, "totalFrames": 64})
    with serve(job, directory=tmp_path / "head") as served:
        for _ in range(4):
            batch = served.reader.get("/v1/batches/next?wait=30")
            assert batch.status == 200, batch
            served.reader.ack(batch)


def test_publish_that_is_forgotten_ends_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("cormorant_api.traces._MOST", 1)
    traces = open_traces(job="a", namespace="b")
    assert traces is not None
    ended: Any = SimpleNamespace(state="applied", timings=UpdateTimings(), receipts=(), error="")
    ended.workers = WorkerCounts(total=0, acked=0, failed=0)
    for ended.version in (1, 2):
        traces.staged(ended.version, {}, began=0.0)
        traces.update_ended(ended)
    assert [line.getMessage() for line in caplog.records if "ended span" in line.getMessage()] == []
    traces.close()


def test_an_unknown_exporter_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(HeadFault, match="OTEL_TRACES_EXPORTER=zipkin is not supported; use otlp, over http/protobuf"):
        open_traces(job="a", namespace="b")
