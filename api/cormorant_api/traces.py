"""Traces of the head: one for each publish and one for each round of batches. Off, and OpenTelemetry is not imported,
unless the standard OTEL_* variables name an exporter.

    publish: receive, verify, store, distribute, one "apply" for each worker
    round:   for each worker ticket > collect, then seal, queue, deliver (each delivery), acknowledge

The head writes all spans, from times that workers and fleet report anyway: workers record nothing, and no trace context
crosses Ray. A publish continues the caller's trace (`traceparent`); a round links to the publish of the weights that
collected it. Methods of both classes may be called from any thread and never block.
"""

from collections.abc import Mapping

from cormorant_contract.rest.updates import Update
from cormorant_worker.fleet.batch_queue import Loan


class RoundTrace:
    """The trace of a round; this base class records nothing."""

    headers: Mapping[str, str] = {}
    """`traceparent`, for the response that delivers the round; empty when it is not traced."""

    def lent(self, consumer: str) -> None: ...

    def sent(self) -> None:
        """A response ended."""

    def over(self, how: str) -> None:
        """The round is never delivered again."""


class Traces:
    """Receives publishes and rounds from the head; this base class records nothing."""

    def staged(self, version: int, headers: Mapping[str, str], *, began: float) -> None:
        """A publish is verified and stored. `began`: when its first byte arrived, in monotonic seconds."""

    def update_ended(self, update: Update) -> None:
        """The update is applied, failed or superseded."""

    def begin_round(self, loan: Loan) -> RoundTrace:
        """A round left the fleet's queue."""
        return RoundTrace()

    def close(self) -> None:
        """Send pending spans, for at most three seconds."""
