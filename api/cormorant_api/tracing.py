"""Traces of the head: one for each publish and one for each round of batches. Off, and OpenTelemetry is not imported,
unless the standard OTEL_* variables name an exporter.

    publish: receive, verify, store, distribute, one "apply" for each worker
    round:   for each worker ticket > collect, then seal, queue, deliver (each delivery), acknowledge

The head writes all spans, from times that workers and fleet report anyway: workers record nothing, and no context has
to cross Ray. A publish continues the caller's trace (`traceparent`); a round links to the publish whose weights acted.
"""

import os
from collections.abc import Mapping

from cormorant_api.errors import HeadFault
from cormorant_contract.rest.updates import Update
from cormorant_worker.fleet.batch_queue import Loan

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class RoundTrace:
    """The trace of a round; this one records nothing. Methods may be called from any thread and never block."""

    headers: Mapping[str, str] = {}
    """`traceparent`, for the response that delivers the round; empty when it is not traced."""

    def lent(self, consumer: str) -> None: ...

    def sent(self) -> None:
        """A response ended."""

    def over(self, how: str) -> None:
        """The round is never delivered again."""


class Traces:
    """Where the head reports publishes and rounds; this one records nothing. Methods may be called from any thread and
    never block.
    """

    def staged(self, version: int, headers: Mapping[str, str], *, began: float) -> None:
        """A publish is verified and stored. `began`: when its first byte came, in monotonic seconds."""

    def update_ended(self, update: Update) -> None:
        """Every worker has it, or it failed or is superseded."""

    def begin_round(self, loan: Loan) -> RoundTrace:
        """A round came out of the fleet's queue."""
        return RoundTrace()

    def close(self) -> None:
        """Send what is left, for at most three seconds."""


def open_traces(*, job: str, namespace: str) -> Traces:
    """Traces as the OTEL_* variables ask for them.

    Raises:
        HeadFault: the variables ask for what is not installed, or for an unknown exporter.
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
