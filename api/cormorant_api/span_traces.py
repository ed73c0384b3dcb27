"""Traces as OpenTelemetry spans. Imported only if the OTEL_* variables enable traces."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cormorant_api.errors import HeadFault
from cormorant_api.traces import RoundTrace, Traces
from cormorant_contract.rest.updates import FINAL_STATES, Update
from cormorant_worker.fleet.batch_queue import Loan

log = structlog.get_logger()

_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_MOST = 256
"""Publishes to remember; beyond that, the oldest trace ends."""
_CLOSE_S = 3.0


def make_exporter(name: str) -> SpanExporter:
    """Create the exporter that OTEL_TRACES_EXPORTER names, from its package's entry point."""
    protocol = os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    )
    declared = _OTLP.get(protocol, "") if name == "otlp" else name
    for found in entry_points(group="opentelemetry_traces_exporter", name=declared):
        exporter: SpanExporter = found.load()()
        return exporter
    raise HeadFault(
        f"OTEL_TRACES_EXPORTER={name} with protocol {protocol} is not supported or not installed; use otlp with "
        "http/protobuf or grpc, console or none"
    )


class SpanTraces(Traces):
    """Traces as spans of one provider."""

    def __init__(self, exporter: SpanExporter, *, job: str, namespace: str, endpoint: str) -> None:
        attributes: dict[str, Any] = {"cormorant.job": job, "cormorant.namespace": namespace}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = "cormorant-head"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        log.info("traces_on", exporter=type(exporter).__name__, endpoint=endpoint)
        self._tracer = self._provider.get_tracer("cormorant")
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._publishes: OrderedDict[int, tuple[Span, float, float]] = OrderedDict()
        """By version: root span, and times of its begin and staging. Ended publishes stay, because rounds link to
        them.
        """
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def staged(self, version: int, headers: Mapping[str, str], *, began: float) -> None:
        root = self._tracer.start_span(
            "publish",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=self.ns(began),
            attributes={"cormorant.version": version},
        )
        with self._lock:
            self._publishes[version] = root, began, time.monotonic()
            if len(self._publishes) > _MOST:
                _end(self._publishes.popitem(last=False)[1][0])

    def update_ended(self, update: Update) -> None:
        """Write all spans of a publish, from the times in its update."""
        with self._lock:
            root, began, staged = self._publishes.get(update.version, (None, 0.0, 0.0))
        if root is None or update.state not in FINAL_STATES or not root.is_recording():
            return
        received = began + update.timings.receive_ms / 1000
        verified = min(staged, received + update.timings.verify_ms / 1000)
        self.span("receive", root, began, received)
        self.span("verify", root, received, verified)
        self.span("store", root, verified, staged)
        self.span("distribute", root, staged, staged + update.timings.distribute_ms / 1000)
        applied = [receipt for receipt in update.receipts if receipt.state == "applied"]
        for receipt in applied:
            at = received + (receipt.latency_ms or 0.0) / 1000
            self.span("apply", root, staged, at, {"cormorant.worker": receipt.worker})
        root.set_attributes({"cormorant.state": update.state, "cormorant.workers": len(applied)})
        if update.error:
            root.set_status(StatusCode.ERROR, update.error)
        root.end()

    def begin_round(self, loan: Loan) -> RoundTrace:
        with self._lock:
            acted, _, _ = self._publishes.get(loan.max_version, (None, 0.0, 0.0))
        root = self._tracer.start_span(
            "round",
            start_time=self.ns(min(part.handed_at for part in loan.parts)),
            links=[Link(acted.get_span_context())] if acted is not None else [],
            attributes={
                "cormorant.frames": loan.num_frames,
                "cormorant.min_version": loan.min_version,
                "cormorant.max_version": loan.max_version,
            },
        )
        if not root.is_recording():  # OTEL_TRACES_SAMPLER dropped it
            return RoundTrace()
        for part in loan.parts:
            who = {"cormorant.worker": part.worker, "cormorant.attempt": part.attempt}
            ticket = self.span("ticket", root, part.handed_at, part.sealed_at, who)
            self.span("collect", ticket, part.sealed_at - part.collect_s, part.sealed_at, who)
        self.span("seal", root, max(part.sealed_at for part in loan.parts), loan.accepted_at)
        self.span("queue", root, loan.accepted_at, time.monotonic())
        return _SpanRound(self, root)

    def close(self) -> None:
        with self._lock:
            for root, _, _ in self._publishes.values():
                _end(root)
        # An exporter that cannot reach its collector retries for longer than a head may take to exit.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def span(
        self, name: str, parent: Span, began: float, ended: float, attributes: Mapping[str, Any] | None = None
    ) -> Span:
        # Times come from several threads: a span may seem to begin shortly after it ended.
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            start_time=self.ns(min(began, ended)),
            attributes=dict(attributes or {}),
        )
        span.end(self.ns(ended))
        return span

    def ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + int(monotonic_s * 1e9)


class _SpanRound(RoundTrace):
    def __init__(self, traces: SpanTraces, root: Span) -> None:
        self._traces, self._root = traces, root
        self._consumer, self._lent_at, self._sent_at = "", 0.0, 0.0
        self.headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(self.headers, set_span_in_context(root))

    def lent(self, consumer: str) -> None:
        self._consumer, self._lent_at = consumer, time.monotonic()

    def sent(self) -> None:
        self._sent_at = time.monotonic()
        self._span("deliver", self._lent_at, self._sent_at)

    def over(self, how: str) -> None:
        now = time.monotonic()
        if how == "acknowledged":
            # It may arrive before the end of the response.
            self._span("acknowledge", self._sent_at if self._sent_at >= self._lent_at else now, now)
        self._root.set_attribute("cormorant.end", how)
        self._root.end(self._traces.ns(now))

    def _span(self, name: str, began: float, ended: float) -> None:
        self._traces.span(name, self._root, began, ended, {"cormorant.consumer": self._consumer})


def _end(root: Span) -> None:
    if root.is_recording():
        root.end()
