"""`/metrics` of a head over a real fleet: it says what the API says, and stays small, as do the head's readings.
Traces, as an OTLP endpoint receives them from the SDK's own exporter.

CORMORANT_COLLECTOR, the command line of an OpenTelemetry collector, puts it between the head and the endpoint.
"""

import gzip
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_contract.metrics import BUDGET, METRICS
from cormorant_testing.collecting import make_job
from cormorant_testing.fleets import served as with_servers
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead
from cormorant_testing.scripts import Server, until, unused_port
from cormorant_testing.serving import Api, Served, serve, weights_file
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.launch import load_job

WEIGHTS = "/v1/models/policy/weights"
DECLARED = {sample: metric for metric in METRICS["head"] for sample in metric.sample_names}


def scraped(api: Api) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels."""
    reply = api.get("/metrics")
    assert reply.status == 200, reply
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "collectorjob"}
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


def total(api: Api, name: str, **labels: str) -> float:
    return sum(value for key, value in scraped(api).get(name, {}).items() if labels.items() <= dict(key).items())


def wait_for(api: Api, name: str, at_least: float, **labels: str) -> None:
    until(lambda: total(api, name, **labels) >= at_least, what=f"{at_least} of {name} {labels}")


def test_metrics_need_no_token_and_are_the_contracts_within_its_budget(endless: Served) -> None:
    for consumer in range(30):
        endless.data.take(wait=10, consumer=f"c{consumer}")
    found = scraped(endless.anonymous)
    assert sum(map(len, found.values())) <= BUDGET["head"]
    for name, samples in found.items():
        assert name in DECLARED, name
        for labels in samples:
            assert {key for key, _ in labels} - {"le"} == set(DECLARED[name].label_names) - {"collectorjob"}
    conditional = {metric.name for metric in METRICS["head"] if metric.when}
    silent = {metric.name for metric in METRICS["head"] if not set(metric.sample_names) & set(found)}
    assert silent <= conditional


def test_frames_batches_and_weights_are_those_of_the_api(endless: Served) -> None:
    api = endless.operator
    before = total(api, "cormorant_weight_updates_total", result="applied")
    reply = api.take(wait=60, consumer="metrics")
    assert reply.status == 200
    assert api.put(WEIGHTS, weights_file(3), Prefer="wait=60").status == 200
    assert api.put(WEIGHTS, b"nonsense").status in (400, 415)
    wait_for(api, "cormorant_weight_updates_total", before + 1, result="applied")
    wait_for(api, "cormorant_weight_updates_total", 1, result="rejected")
    wait_for(api, "cormorant_batches_total", 1, path="http")
    status = api.get("/v1/status").json
    assert api.post("/v1/pause").status == 200
    found, status = scraped(api), api.get("/v1/status").json
    assert sum(found["cormorant_frames_total"].values()) == status["frames"]["collected"]
    assert sum(found["cormorant_policy_version_published"].values()) == status["weights"]["version"]
    assert found["cormorant_paused"] == {(): 1}
    assert found["cormorant_head_state"][(("state", "paused"),)] == 1
    assert sum(found["cormorant_head_state"].values()) == 1
    assert found["cormorant_batch_bytes_total"][(("path", "http"),)] >= len(reply.body)
    assert found["cormorant_consumers"][()] >= 1
    assert sum(found["cormorant_weight_update_duration_seconds_count"].values()) % 5 == 0
    assert api.post("/v1/resume").status == 200


def test_workers_time_adds_up_and_standing_still_is_paused(endless: Served) -> None:
    api = endless.operator
    assert api.post("/v1/pause").status == 200
    name = "cormorant_phase_seconds_total"
    began = time.monotonic()
    first = scraped(api)[name]
    until(lambda: total(api, name, phase="paused") > first[(("group", "cpu"), ("phase", "paused"))] + 1)
    last, elapsed_s = scraped(api)[name], time.monotonic() - began
    assert api.post("/v1/resume").status == 200
    grown = {dict(key)["phase"]: last[key] - first[key] for key in last}
    assert max(grown, key=lambda phase: grown[phase]) == "paused"  # each may have been in a vector step
    assert sum(grown.values()) < 2 * elapsed_s + 1, "two workers"
    assert first[(("group", "cpu"), ("phase", "env"))] > 0
    assert first[(("group", "cpu"), ("phase", "inference"))] > 0


def test_a_worker_that_dies_takes_no_counter_back(endless: Served) -> None:
    api = endless.operator
    counters = {metric.name for metric in METRICS["head"] if metric.kind == "counter"}
    before = {name: samples for name, samples in scraped(api).items() if name in counters}
    psutil.Process(api.get("/v1/workers").json["workers"][0]["pid"]).kill()
    wait_for(api, "cormorant_worker_restarts_total", 1, reason="crash")
    after = scraped(api)
    for name, samples in before.items():
        for labels, value in samples.items():
            assert after[name][labels] >= value, (name, labels)


def test_housekeeping_reads_all_workers_once_a_second(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[bool] = []
    with HeadServer(make_job(), HeadSettings(port=0, directory=folder)) as server:
        began = time.monotonic()
        fleet = server.start_fleet(FleetOptions(workers=1))
        stats = fleet.stats
        monkeypatch.setattr(fleet, "stats", lambda *, workers=True: readings.append(workers) or stats(workers=workers))
        until(lambda: readings.count(False) >= 4)
        for _ in range(20):
            assert Served(server).reader.get("/v1/status").status == 200
        assert readings.count(True) <= 1 + (time.monotonic() - began) / 1.0
        assert readings.count(True) < readings.count(False)


@pytest.mark.slow
def test_a_scrape_while_the_head_closes_gets_its_last_numbers(tmp_path: Path) -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=(3, 8), step_s=0.001)
    with serve(job, directory=tmp_path) as served:
        wait_for(served.anonymous, "cormorant_frames_total", 1)
        head = served.server.head
        counted = total(served.anonymous, "cormorant_frames_total")
        head.close()
        assert total(served.anonymous, "cormorant_frames_total") >= counted
        assert total(served.anonymous, "cormorant_head_state", state="draining") == 1


def test_status_says_what_servers_do_and_how_they_call_the_policy(tmp_path: Path) -> None:
    document = with_servers(make_job(num_envs=4, queue={"onFull": "drop_oldest"}), batchShapes=[8]).to_document()
    document["spec"]["policy"]["compile"] = "auto"
    with serve(load_job(document), directory=tmp_path) as served:

        def report() -> dict[str, float]:
            found: dict[str, float] = served.status["inference"].get("act", {})
            return found

        until(lambda: report().get("rows_per_second", 0) > 0)
        found = report()
        assert found["rows_per_act"] in (2.0, 4.0) or 2 < found["rows_per_act"] < 4
        assert found["padding"] == pytest.approx(1 - found["rows_per_act"] / 8, abs=0.01)
        assert 0 < found["busy"] < 1
        assert min(found["act_ms"], found["wait_ms"]) > 0
        served.fleet.resize({"act": 2})
        told = served.server.head.events

        def is_told() -> bool:
            # Each batch that is dropped is an event, too: the first ones are soon forgotten.
            found, _ = told.read(told.position_after(""), most=sys.maxsize) or ([], 0)
            return "act-1" in [event.worker for event in found if event.kind == "worker_ready"]

        until(is_told)


# -- traces ------------------------------------------------------------------------------------------------------


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


def test_publishes_and_rounds_are_traced(collector: Collector, tmp_path: Path) -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", collection={"framesPerBatch": 16, "totalFrames": 160})
    given = []
    with serve(job, directory=tmp_path / "head", workers=2) as served:
        # Workers act with it from their next batch on.
        reply = served.writer.put("/v1/models/policy/weights", weights_file(1.0), traceparent=PARENT)
        assert reply.status in (200, 202), reply
        while (batch := served.reader.get("/v1/batches/next?consumer=learner&wait=10")).status == 200:
            given.append(batch.headers.get("traceparent", ""))
            served.reader.ack(batch)
    collector.flush()
    assert collector.resources[0]["service.name"] == "cormorant-head"
    assert collector.resources[0]["cormorant.job"] == job.metadata.name

    ((publish, below),) = collector.trees("publish")
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
