"""Traces as OpenTelemetry spans. Imported only where the OTEL_* variables ask for traces."""

import importlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cormorant_api.errors import HeadError
from cormorant_api.traces import Traces
from cormorant_contract.rest.updates import FINAL_STATES, Update
from cormorant_worker.fleet.bookkeeping.batch_queue import Loan

log = structlog.get_logger()

_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}
ROUNDS_A_SECOND = 10
"""Traced rounds; others are counted in the attribute `cormorant.rounds_untraced` of the next one. A round costs about
0.5 ms of the head's time."""
_MOST_OPEN = 256
"""Traces that have not ended, of each kind; the oldest ends first."""
_CLOSE_S = 3.0


def make_exporter(name: str) -> SpanExporter:
    """The exporter that OTEL_TRACES_EXPORTER names.

    Raises:
        HeadError: it is unknown, or its protocol is.
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
    raise HeadError(
        f"OTEL_TRACES_EXPORTER={name} with protocol {protocol} is not supported; use otlp with "
        f"{' or '.join(_PROTOCOLS)}, console or none"
    )


class _OpenRound:
    __slots__ = ("consumer", "lent_at", "root", "sent_at")

    def __init__(self, root: Span) -> None:
        self.root = root
        self.consumer = ""
        self.lent_at = self.sent_at = 0.0


class _OpenPublish:
    __slots__ = ("at", "is_distributed", "root", "workers")

    def __init__(self, root: Span, at: float) -> None:
        self.root, self.at = root, at
        self.is_distributed = False
        self.workers: set[str] = set()


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
        """Guards everything below."""
        self._publishes: OrderedDict[int, _OpenPublish] = OrderedDict()
        self._contexts: OrderedDict[int, SpanContext] = OrderedDict()
        """The traces of the newest publishes, by version."""
        self._rounds: OrderedDict[int, _OpenRound] = OrderedDict()
        self._tokens, self._filled_at, self._untraced = float(ROUNDS_A_SECOND), time.monotonic(), 0
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    # -- publishes ---------------------------------------------------------------------------------------------

    def staged(
        self, version: int, headers: Mapping[str, str], *, received: float, receive_ms: float, verify_ms: float
    ) -> None:
        now = time.monotonic()
        began, verified = received - receive_ms / 1000, min(now, received + verify_ms / 1000)
        root = self._tracer.start_span(
            "publish",
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=self._ns(began),
            attributes={"cormorant.version": version},
        )
        self._span("receive", root, began, received)
        self._span("verify", root, received, verified)
        self._span("store", root, verified, now)
        with self._lock:
            self._publishes[version] = _OpenPublish(root, now)
            self._contexts[version] = root.get_span_context()
            old = self._publishes.popitem(last=False)[1] if len(self._publishes) > _MOST_OPEN else None
            while len(self._contexts) > _MOST_OPEN:
                self._contexts.popitem(last=False)
        if old is not None:
            old.root.end()

    def distributed(self, version: int) -> None:
        with self._lock:
            found = self._publishes.get(version)
            if found is not None:
                found.is_distributed = True
        if found is not None:
            self._span("distribute", found.root, found.at, time.monotonic())

    def applied(self, worker: str, version: int) -> None:
        with self._lock:
            # A worker that acts with a version has passed or skipped the older ones.
            found = [p for v, p in self._publishes.items() if v <= version and worker not in p.workers]
            for publish in found:
                publish.workers.add(worker)
        now = time.monotonic()
        for publish in found:
            self._span("apply", publish.root, publish.at, now, {"cormorant.worker": worker})

    def update_ended(self, update: Update) -> None:
        if update.state not in FINAL_STATES:
            return
        with self._lock:
            found = self._publishes.pop(update.version, None)
        if found is not None:
            if found.workers and not found.is_distributed:  # they were faster than the thread that reports it
                self._span("distribute", found.root, found.at, time.monotonic())
            self._end_publish(found, update.state, update.error)

    def _end_publish(self, publish: _OpenPublish, state: str, error: str) -> None:
        publish.root.set_attributes({"cormorant.state": state, "cormorant.workers": len(publish.workers)})
        if error:
            publish.root.set_status(StatusCode.ERROR, error)
        publish.root.end()

    # -- rounds ------------------------------------------------------------------------------------------------

    def added(self, number: int, loan: Loan) -> None:
        if not (untraced := self._take_token()):
            return
        now = time.monotonic()
        with self._lock:
            acted = self._contexts.get(loan.max_version)
        root = self._tracer.start_span(
            "round",
            start_time=self._ns(min(part.handed_at for part in loan.parts)),
            links=[Link(acted)] if acted is not None else [],
            attributes={
                "cormorant.frames": loan.num_frames,
                "cormorant.min_version": loan.min_version,
                "cormorant.max_version": loan.max_version,
                "cormorant.rounds_untraced": untraced - 1,
            },
        )
        if root.is_recording():
            for part in loan.parts:
                who = {"cormorant.worker": part.worker, "cormorant.attempt": part.attempt}
                ticket = self._span("ticket", root, part.handed_at, part.sealed_at, who)
                self._span("collect", ticket, part.sealed_at - part.collect_s, part.sealed_at, who)
            self._span("seal", root, max(part.sealed_at for part in loan.parts), loan.accepted_at)
            self._span("queue", root, loan.accepted_at, now)
        with self._lock:
            self._rounds[number] = _OpenRound(root)
            old = self._rounds.popitem(last=False)[1] if len(self._rounds) > _MOST_OPEN else None
        if old is not None:
            old.root.end()

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

    def _take_token(self) -> int:
        """1 + the rounds that were not traced since the last one that was; 0: this one is not."""
        with self._lock:
            now = time.monotonic()
            self._tokens = min(ROUNDS_A_SECOND, self._tokens + (now - self._filled_at) * ROUNDS_A_SECOND)
            self._filled_at = now
            if self._tokens < 1:
                self._untraced += 1
                return 0
            self._tokens -= 1
            untraced, self._untraced = self._untraced, 0
            return untraced + 1

    # -- both --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            left = [*(p.root for p in self._publishes.values()), *(r.root for r in self._rounds.values())]
            self._publishes.clear()
            self._rounds.clear()
        for root in left:
            root.end()
        # An exporter without a collector retries for longer than a head may take to end.
        with suppress(RuntimeError):
            closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

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
