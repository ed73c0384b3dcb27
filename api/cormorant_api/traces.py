"""Traces of the head as OpenTelemetry spans. Imported only if the OTEL_* variables enable traces.

    publish: receive, verify, store, distribute, one "apply" for each worker
    round:   for each worker ticket > collect, then seal, queue, deliver (each delivery), acknowledge

The head writes all spans, from times that workers and fleet report anyway: workers record nothing, and no trace context
crosses Ray. A publish continues the caller's trace (`traceparent`); a round links to the publish of the weights that
collected it. Methods of both classes may be called from any thread and never block.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cormorant_contract.rest.updates import FINAL_STATES, Update
from cormorant_worker.fleet.batch_queue import Loan

_MOST = 256
"""Publishes to remember; beyond that, the oldest trace ends."""
_CLOSE_S = 3.0
# Times are monotonic seconds, spans begin and end in nanoseconds since 1970.
_EPOCH_NS = time.time_ns() - time.monotonic_ns()


class Traces:
    """Spans of publishes and rounds, sent to an OTLP endpoint over HTTP."""

    def __init__(self, *, job: str, namespace: str) -> None:
        attributes: dict[str, Any] = {"cormorant.job": job, "cormorant.namespace": namespace}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = "cormorant-head"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("cormorant")
        self._lock = threading.Lock()
        """Guards `_publishes`."""
        self._publishes: OrderedDict[int, tuple[Span, float, float]] = OrderedDict()
        """By version: root span, and times of its begin and staging. Ended publishes stay, because rounds link to
        them.
        """

    def staged(self, version: int, headers: Mapping[str, str], *, began: float) -> None:
        """A publish is verified and stored. `began`: when its first byte arrived."""
        root = self._tracer.start_span(
            "publish",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=_ns(began),
            attributes={"cormorant.version": version},
        )
        with self._lock:
            self._publishes[version] = root, began, time.monotonic()
            if len(self._publishes) > _MOST:
                oldest, _, _ = self._publishes.popitem(last=False)[1]
                if oldest.is_recording():
                    oldest.end()

    def update_ended(self, update: Update) -> None:
        """Write all spans of a publish that is applied, failed or superseded, from the times in its update."""
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
        for receipt in update.receipts:
            if receipt.state == "applied":
                at = received + (receipt.latency_ms or 0.0) / 1000
                self.span("apply", root, staged, at, {"cormorant.worker": receipt.worker})
        root.set_attributes({"cormorant.state": update.state, "cormorant.workers": update.workers.acked})
        if update.error:
            root.set_status(StatusCode.ERROR, update.error)
        root.end()

    def begin_round(self, loan: Loan) -> "RoundTrace":
        """A round left the fleet's queue."""
        with self._lock:
            acted, _, _ = self._publishes.get(loan.max_version, (None, 0.0, 0.0))
        root = self._tracer.start_span(
            "round",
            start_time=_ns(min(part.handed_at for part in loan.parts)),
            links=[Link(acted.get_span_context())] if acted is not None else [],
            attributes={
                "cormorant.frames": loan.num_frames,
                "cormorant.min_version": loan.min_version,
                "cormorant.max_version": loan.max_version,
            },
        )
        for part in loan.parts:
            who = {"cormorant.worker": part.worker, "cormorant.attempt": part.attempt}
            ticket = self.span("ticket", root, part.handed_at, part.sealed_at, who)
            self.span("collect", ticket, part.sealed_at - part.collect_s, part.sealed_at, who)
        self.span("seal", root, max(part.sealed_at for part in loan.parts), loan.accepted_at)
        self.span("queue", root, loan.accepted_at, time.monotonic())
        return RoundTrace(self, root)

    def close(self) -> None:
        """Send pending spans, for at most three seconds: an exporter without a collector retries for longer."""
        with self._lock:
            for root, _, _ in self._publishes.values():
                if root.is_recording():
                    root.end()
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
            start_time=_ns(min(began, ended)),
            attributes=dict(attributes or {}),
        )
        span.end(_ns(ended))
        return span


class RoundTrace:
    """The trace of a round that consumers take."""

    def __init__(self, traces: Traces, root: Span) -> None:
        self._traces, self._root = traces, root
        self._lent_at = self._sent_at = 0.0
        self.headers: dict[str, str] = {}
        """`traceparent`, for the response that delivers the round."""
        TraceContextTextMapPropagator().inject(self.headers, set_span_in_context(root))

    def lent(self) -> None:
        self._lent_at = time.monotonic()

    def sent(self) -> None:
        """A response ended."""
        self._sent_at = time.monotonic()
        self._traces.span("deliver", self._root, self._lent_at, self._sent_at)

    def over(self, how: str) -> None:
        """The round is never delivered again."""
        now = time.monotonic()
        if how == "acknowledged":
            # It may arrive before the end of the response.
            self._traces.span("acknowledge", self._root, self._sent_at if self._sent_at >= self._lent_at else now, now)
        self._root.set_attribute("cormorant.end", how)
        self._root.end(_ns(now))


def _ns(monotonic_s: float) -> int:
    return _EPOCH_NS + int(monotonic_s * 1e9)
