"""Traces of the head: one for each publish and one for each round of batches. Off, and OpenTelemetry is not imported,
unless the standard OTEL_* variables name an exporter.

    publish: receive, verify, store, distribute, one "apply" for each worker
    round:   for each worker ticket > collect, then seal, queue, deliver (each delivery), acknowledge

The head writes all spans, from times that workers and fleet report anyway: workers record nothing, and no context has
to cross Ray. A publish continues the caller's trace (`traceparent`); a round links to the publish whose weights acted.
"""

import os
from collections.abc import Mapping

from cormorant_api.errors import HeadError
from cormorant_contract.rest.updates import Update
from cormorant_worker.fleet.bookkeeping.batch_queue import Loan

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Traces:
    """Where the head reports publishes and rounds; this one records nothing. Methods may be called from any thread and
    never block.
    """

    def staged(self, version: int, headers: Mapping[str, str], *, began: float) -> None:
        """A publish is verified and stored. `began`: when its first byte came, in monotonic seconds."""

    def update_ended(self, update: Update) -> None:
        """Every worker has it, or it failed or is superseded."""

    def added(self, number: int, loan: Loan) -> None:
        """A round came out of the fleet's queue."""

    def lent(self, number: int, consumer: str) -> None: ...

    def sent(self, number: int) -> None:
        """A response ended."""

    def over(self, number: int, how: str) -> None:
        """A round is never delivered again."""

    def headers_of(self, number: int) -> dict[str, str]:
        """`traceparent` of a round's trace, for the response that delivers it; empty when it is not traced."""
        return {}

    def close(self) -> None:
        """Send what is left, for at most three seconds."""


def open_traces(*, job: str, namespace: str) -> Traces:
    """Traces as the OTEL_* variables ask for them.

    Raises:
        HeadError: the variables ask for what is not installed, or for an unknown exporter.
    """
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp" if any(map(os.environ.get, _ENDPOINTS)) else "none")
    if exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Traces()
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
    try:
        from cormorant_api.span_traces import SpanTraces, make_exporter

        return SpanTraces(make_exporter(exporter), job=job, namespace=namespace, endpoint=endpoint)
    except ImportError as error:
        raise HeadError(
            f"the OTEL_* variables ask for traces, but {error.name} is not installed; install cormorant[otel], or set "
            "OTEL_TRACES_EXPORTER=none"
        ) from None
