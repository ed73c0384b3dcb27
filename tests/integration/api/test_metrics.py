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
from contextlib import ExitStack
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


def test_housekeeping_reads_all_workers_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[bool] = []
    with HeadServer(make_job(), HeadSettings(port=0, directory=tmp_path)) as server:
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
    document = with_servers(make_job(num_envs=4, queue={"onFull": "drop_oldest"})).to_document()
    document["spec"]["policy"]["compile"] = "auto"
    document["spec"]["inference"] = {"batchShapes": [8]}
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


def attributes(of: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in of.attributes}


class Collector(ScriptedHead):
    """Receives OTLP over HTTP."""

    between: Server | None = None
    """An OpenTelemetry collector that batches and exports again what it receives."""

    def __init__(self) -> None:
        self.resources: list[dict[str, Any]] = []
        self.traces: dict[bytes, dict[str, list[Any]]] = {}
        """Spans of each trace, by name."""
        super().__init__(self._receive)

    def _receive(self, heard: Heard) -> Say:
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(heard.body) if "content-encoding" in heard.headers else heard.body)
        for of_resource in request.resource_spans:
            self.resources.append(attributes(of_resource.resource))
            for span in (span for scope in of_resource.scope_spans for span in scope.spans):
                self.traces.setdefault(span.trace_id, {}).setdefault(span.name, []).append(span)
        return Say(body=b"")


@pytest.fixture(params=["direct", "real"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    if request.param == "real" and not os.environ.get(VARIABLE):
        pytest.skip(f"no OpenTelemetry collector: {VARIABLE} names its command line (CONTRIBUTING.md)")
    with Collector() as collector, ExitStack() as stack:
        url = collector.url
        if request.param == "real":
            address = f"127.0.0.1:{unused_port()}"
            command, url = os.environ[VARIABLE].format(address=address, endpoint=url), f"http://{address}"
            collector.between = stack.enter_context(Server(shlex.split(command), url))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield collector


def test_publishes_and_rounds_are_traced(collector: Collector, tmp_path: Path) -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", collection={"framesPerBatch": 16, "totalFrames": 160})
    given, links = [], set[str]()
    with serve(job, directory=tmp_path / "head", workers=2) as served:
        # Workers act with it from their next batch on.
        reply = served.writer.put("/v1/models/policy/weights", weights_file(1.0), traceparent=PARENT)
        assert reply.status in (200, 202), reply
        while (batch := served.reader.get("/v1/batches/next?consumer=learner&wait=10")).status == 200:
            given.append(batch.headers.get("traceparent", ""))
            served.reader.ack(batch)
    assert collector.between is None or collector.between.end() == 0
    assert collector.resources[0]["service.name"] == "cormorant-head"
    assert collector.resources[0]["cormorant.job"] == job.metadata.name

    published = collector.traces.pop(bytes.fromhex(PARENT.split("-")[1]))
    assert {name: len(spans) for name, spans in published.items()} == {
        "publish": 1, "receive": 1, "verify": 1, "store": 1, "distribute": 1, "apply": 2,
    }  # fmt: skip
    (publish,) = published.pop("publish")
    assert publish.parent_span_id.hex() == PARENT.split("-")[2]
    assert {span.parent_span_id for spans in published.values() for span in spans} == {publish.span_id}
    assert attributes(publish)["cormorant.version"] == 1
    assert {attributes(span)["cormorant.worker"] for span in published["apply"]} == {"cpu-0", "cpu-1"}

    assert len(collector.traces) == len(given) == 10
    assert {text.split("-")[1] for text in given} == {trace_id.hex() for trace_id in collector.traces}
    for trace in collector.traces.values():
        (root,), (ticket,), (collect,), *others = (
            trace.pop(name) for name in ("round", "ticket", "collect", "seal", "queue", "deliver", "acknowledge")
        )
        assert trace == {}
        assert (attributes(root)["cormorant.frames"], attributes(root)["cormorant.end"]) == (16, "acknowledged")
        order = [ticket, *(span for (span,) in others)]
        assert order == sorted(order, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
        assert root.start_time_unix_nano == ticket.start_time_unix_nano
        assert collect.parent_span_id == ticket.span_id
        assert {span.parent_span_id for span in order} == {root.span_id}
        links |= {link.trace_id.hex() for link in root.links}
    assert links == {PARENT.split("-")[1]}


def test_an_absent_collector_delays_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # longer than a test may take
    job = make_job(num_envs=2, collection={"framesPerBatch": 16, "totalFrames": 64})
    with serve(job, directory=tmp_path / "head") as served:
        for _ in range(4):
            batch = served.reader.get("/v1/batches/next?wait=30")
            assert batch.status == 200, batch
            served.reader.ack(batch)
