"""What the head reports to traces."""

from collections.abc import Mapping

from cormorant_contract.rest.updates import Update
from cormorant_worker.fleet.batch_queue import Loan


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
