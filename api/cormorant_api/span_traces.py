"""Traces as OpenTelemetry spans. Imported only where the OTEL_* variables ask for traces."""

import importlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cormorant_api.errors import HeadFault
from cormorant_api.traces import RoundTrace, Traces
from cormorant_contract.rest.updates import FINAL_STATES, Update
from cormorant_worker.fleet.batch_queue import Loan

log = structlog.get_logger()

_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}
ROUNDS_A_SECOND = 10
"""Traced rounds; others are counted in the attribute `cormorant.rounds_untraced` of the next one. A round costs about
0.5 ms of the head's time."""
_MOST = 256
"""Publishes that are remembered; the trace of the oldest ends first."""
_CLOSE_S = 3.0


def make_exporter(name: str) -> SpanExporter:
    """The exporter that OTEL_TRACES_EXPORTER names; ImportError if its package is not installed."""
    protocol = os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    )
    if name == "console":
        return ConsoleSpanExporter()
    if name == "otlp" and protocol in _PROTOCOLS:
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{_PROTOCOLS[protocol]}.trace_exporter")
        exporter: SpanExporter = module.OTLPSpanExporter()
        return exporter
    raise HeadFault(
        f"OTEL_TRACES_EXPORTER={name} with protocol {protocol} is not supported; use otlp with "
        f"{' or '.join(_PROTOCOLS)}, console or none"
    )


@dataclass(slots=True)
class _Publish:
    root: Span
    began: float
    staged: float


class _SpanRound(RoundTrace):
    def __init__(self, traces: "SpanTraces", root: Span) -> None:
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
            if self._sent_at < self._lent_at:
                # The acknowledgement overtook the end of the response.
                self._span("deliver", self._lent_at, now)
                self._sent_at = now
            self._span("acknowledge", self._sent_at, now)
        self._root.set_attribute("cormorant.end", how)
        self._traces.end(self._root, now)

    def _span(self, name: str, began: float, ended: float) -> None:
        if self._root.is_recording():
            self._traces.span(name, self._root, began, ended, {"cormorant.consumer": self._consumer})


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
        """Guards what follows."""
        self._publishes: OrderedDict[int, _Publish] = OrderedDict()
        """By version; also those that have ended, because rounds link to them."""
        self._second = self._traced = self._untraced = 0
        """The second of the newest round, the rounds traced in it, and those not traced since the last one that was."""
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    # -- publishes ---------------------------------------------------------------------------------------------

    def staged(self, version: int, headers: Mapping[str, str], *, began: float) -> None:
        root = self._tracer.start_span(
            "publish",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=self._ns(began),
            attributes={"cormorant.version": version},
        )
        with self._lock:
            self._publishes[version] = _Publish(root, began, staged=time.monotonic())
            old = self._publishes.popitem(last=False)[1] if len(self._publishes) > _MOST else None
        if old is not None:
            self.end(old.root, time.monotonic())

    def update_ended(self, update: Update) -> None:
        """Write all spans of a publish, from the times in its update."""
        with self._lock:
            publish = self._publishes.get(update.version)
        if publish is None or update.state not in FINAL_STATES or not publish.root.is_recording():
            return
        root, staged, timings = publish.root, publish.staged, update.timings
        received = publish.began + timings.receive_ms / 1000
        verified = min(staged, received + timings.verify_ms / 1000)
        self.span("receive", root, publish.began, received)
        self.span("verify", root, received, verified)
        self.span("store", root, verified, staged)
        self.span("distribute", root, staged, staged + timings.distribute_ms / 1000)
        applied = [receipt for receipt in update.receipts if receipt.state == "applied"]
        for receipt in applied:
            at = received + (receipt.latency_ms or 0.0) / 1000
            self.span("apply", root, staged, at, {"cormorant.worker": receipt.worker})
        root.set_attributes({"cormorant.state": update.state, "cormorant.workers": len(applied)})
        if update.error:
            root.set_status(StatusCode.ERROR, update.error)
        root.end()

    # -- rounds ------------------------------------------------------------------------------------------------

    def begin_round(self, loan: Loan) -> RoundTrace:
        now = time.monotonic()
        with self._lock:
            if int(now) != self._second:
                self._second, self._traced = int(now), 0
            if self._traced >= ROUNDS_A_SECOND:
                self._untraced += 1
                return RoundTrace()
            self._traced += 1
            untraced, self._untraced = self._untraced, 0
            acted = self._publishes.get(loan.max_version)
        root = self._tracer.start_span(
            "round",
            start_time=self._ns(min(part.handed_at for part in loan.parts)),
            links=[Link(acted.root.get_span_context())] if acted is not None else [],
            attributes={
                "cormorant.frames": loan.num_frames,
                "cormorant.min_version": loan.min_version,
                "cormorant.max_version": loan.max_version,
                "cormorant.rounds_untraced": untraced,
            },
        )
        if root.is_recording():
            for part in loan.parts:
                who = {"cormorant.worker": part.worker, "cormorant.attempt": part.attempt}
                ticket = self.span("ticket", root, part.handed_at, part.sealed_at, who)
                self.span("collect", ticket, part.sealed_at - part.collect_s, part.sealed_at, who)
            self.span("seal", root, max(part.sealed_at for part in loan.parts), loan.accepted_at)
            self.span("queue", root, loan.accepted_at, now)
        return _SpanRound(self, root)

    # -- both --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            roots = [publish.root for publish in self._publishes.values()]
        for root in roots:
            self.end(root, time.monotonic())
        # An exporter without a collector retries for longer than a head may take to end.
        with suppress(RuntimeError):
            closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

    def end(self, root: Span, at: float) -> None:
        if root.is_recording():
            root.end(self._ns(at))

    def span(
        self, name: str, parent: Span, began: float, ended: float, attributes: Mapping[str, Any] | None = None
    ) -> Span:
        # Clocks of several threads: a part may seem to begin a moment after it ended.
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            start_time=self._ns(min(began, ended)),
            attributes=dict(attributes or {}),
        )
        span.end(self._ns(ended))
        return span

    def _ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + int(monotonic_s * 1e9)
