"""Traces of the head: one for each publish and one for each round of batches. Off, and OpenTelemetry is not imported,
unless the standard OTEL_* variables name an exporter.

    publish: receive, verify, store, distribute, one "apply" for each worker
    round:   for each worker ticket > collect, then seal, queue, deliver (each delivery), acknowledge

The head writes all spans, from times that workers and fleet report anyway: workers record nothing, and no trace context
crosses Ray. A publish continues the caller's trace (`traceparent`); a round links to the publish of the weights that
collected it.
"""

import os

from cormorant_api.errors import HeadFault
from cormorant_api.traces import Traces

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def open_traces(*, job: str, namespace: str) -> Traces:
    """Create the traces that the OTEL_* variables select.

    Raises:
        HeadFault: the variables require a package that is not installed, or name an unknown exporter.
    """
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp" if endpoint else "none")
    if exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Traces()
    try:
        from cormorant_api.span_traces import SpanTraces, make_exporter

        return SpanTraces(make_exporter(exporter), job=job, namespace=namespace, endpoint=endpoint)
    except ImportError as error:
        raise HeadFault(
            f"the OTEL_* variables ask for traces, but {error.name} is not installed; install cormorant[otel], or set "
            "OTEL_TRACES_EXPORTER=none"
        ) from None
