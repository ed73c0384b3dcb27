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
from cormorant_api.traces import Traces
from cormorant_contract.rest.updates import FINAL_STATES, Update
from cormorant_worker.fleet.batch_queue import Loan

log = structlog.get_logger()

_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}
ROUNDS_A_SECOND = 10
"""Traced rounds; others are counted in the attribute `cormorant.rounds_untraced` of the next one. A round costs about
0.5 ms of the head's time."""
_MOST = 256
"""Publishes and rounds that are remembered; the trace of the oldest ends first."""
_CLOSE_S = 3.0


def make_exporter(name: str) -> SpanExporter:
    """The exporter that OTEL_TRACES_EXPORTER names.

    Raises:
        HeadFault: it is unknown, or its protocol is.
        ImportError: its package is not installed.
    """
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


@dataclass(slots=True)
class _Round:
    root: Span
    consumer: str = ""
    lent_at: float = 0.0
    sent_at: float = 0.0


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
        self._propagator = TraceContextTextMapPropagator()
        self._lock = threading.Lock()
        """Guards what follows."""
        self._publishes: OrderedDict[int, _Publish] = OrderedDict()
        """By version; also those that have ended, because rounds link to them."""
        self._rounds: OrderedDict[int, _Round] = OrderedDict()
        self._second = self._traced = self._untraced = 0
        """The second of the newest round, the rounds traced in it, and those not traced since the last one that was."""
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    # -- publishes ---------------------------------------------------------------------------------------------

    def staged(self, version: int, headers: Mapping[str, str], *, began: float) -> None:
        root = self._tracer.start_span(
            "publish",
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=self._ns(began),
            attributes={"cormorant.version": version},
        )
        self._remember(self._publishes, version, _Publish(root, began, staged=time.monotonic()))

    def update_ended(self, update: Update) -> None:
        """Write all spans of a publish, from the times in its update."""
        with self._lock:
            publish = self._publishes.get(update.version)
        if publish is None or update.state not in FINAL_STATES or not publish.root.is_recording():
            return
        root, staged, timings = publish.root, publish.staged, update.timings
        received = publish.began + timings.receive_ms / 1000
        verified = min(staged, received + timings.verify_ms / 1000)
        self._span("receive", root, publish.began, received)
        self._span("verify", root, received, verified)
        self._span("store", root, verified, staged)
        self._span("distribute", root, staged, staged + timings.distribute_ms / 1000)
        applied = [receipt for receipt in update.receipts if receipt.state == "applied"]
        for receipt in applied:
            at = received + (receipt.latency_ms or 0.0) / 1000
            self._span("apply", root, staged, at, {"cormorant.worker": receipt.worker})
        root.set_attributes({"cormorant.state": update.state, "cormorant.workers": len(applied)})
        if update.error:
            root.set_status(StatusCode.ERROR, update.error)
        root.end()

    # -- rounds ------------------------------------------------------------------------------------------------

    def added(self, number: int, loan: Loan) -> None:
        now = time.monotonic()
        with self._lock:
            if int(now) != self._second:
                self._second, self._traced = int(now), 0
            if self._traced >= ROUNDS_A_SECOND:
                self._untraced += 1
                return
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
                ticket = self._span("ticket", root, part.handed_at, part.sealed_at, who)
                self._span("collect", ticket, part.sealed_at - part.collect_s, part.sealed_at, who)
            self._span("seal", root, max(part.sealed_at for part in loan.parts), loan.accepted_at)
            self._span("queue", root, loan.accepted_at, now)
        self._remember(self._rounds, number, _Round(root))

    def lent(self, number: int, consumer: str) -> None:
        with self._lock:
            if (found := self._rounds.get(number)) is not None:
                found.consumer, found.lent_at = consumer, time.monotonic()

    def sent(self, number: int) -> None:
        with self._lock:
            found = self._rounds.get(number)
        if found is not None:
            found.sent_at = time.monotonic()
            self._span("deliver", found.root, found.lent_at, found.sent_at, {"cormorant.consumer": found.consumer})

    def over(self, number: int, how: str) -> None:
        with self._lock:
            found = self._rounds.pop(number, None)
        if found is None:
            return
        now = time.monotonic()
        if how == "acknowledged":
            who = {"cormorant.consumer": found.consumer}
            if found.sent_at < found.lent_at:
                # The acknowledgement overtook the end of the response.
                self._span("deliver", found.root, found.lent_at, now, who)
                found.sent_at = now
            self._span("acknowledge", found.root, found.sent_at, now, who)
        found.root.set_attribute("cormorant.end", how)
        found.root.end(self._ns(now))

    def headers_of(self, number: int) -> dict[str, str]:
        with self._lock:
            found = self._rounds.get(number)
        headers: dict[str, str] = {}
        if found is not None:
            self._propagator.inject(headers, set_span_in_context(found.root))
        return headers

    # -- both --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            roots = [*(p.root for p in self._publishes.values()), *(r.root for r in self._rounds.values())]
        for root in roots:
            if root.is_recording():
                root.end()
        # An exporter without a collector retries for longer than a head may take to end.
        with suppress(RuntimeError):
            closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

    def _remember(self, kind: OrderedDict[int, Any], number: int, trace: _Publish | _Round) -> None:
        with self._lock:
            kind[number] = trace
            old = kind.popitem(last=False)[1] if len(kind) > _MOST else None
        if old is not None and old.root.is_recording():
            old.root.end()

    def _span(
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
