"""A publish that the head has: what became of it, and waiting for the workers."""

import time
from collections.abc import Sequence

from cormorant_client.errors import NotFound, UpdateFailed
from cormorant_client.head import HeadConnection, quoted
from cormorant_contract.fleet import Receipt
from cormorant_contract.rest import updates as rest

_LONGEST_POLL_S = 20.0


class Update(Receipt):
    """Properties are as of the last answer; `wait` and `refresh` ask again."""

    def __init__(self, head: HeadConnection, answer: rest.Update) -> None:
        self._head = head
        self.answer = answer
        """The whole answer."""

    @property
    def version(self) -> int:
        return self.answer.version

    @property
    def etag(self) -> str:
        """Names this version, as the base of a `patch`."""
        return self.answer.etag

    @property
    def state(self) -> rest.UpdateState:
        """The last word: staged -> applying -> applied | partially_applied | failed | superseded."""
        return self.answer.state

    @property
    def warning(self) -> str:
        """What did not work though the publish stands, e.g. a disk that refused it; empty: nothing."""
        return self.answer.warning

    @property
    def digest(self) -> str:
        """`xxh3:...` of the bytes that the head received."""
        return self.answer.digest

    @property
    def receipts(self) -> tuple[rest.UpdateReceipt, ...]:
        """Each worker's word."""
        return self.answer.receipts

    @property
    def applied(self) -> tuple[str, ...]:
        return self._in_state("applied")

    @property
    def waiting(self) -> tuple[str, ...]:
        return self._in_state("waiting")

    @property
    def refused(self) -> dict[str, str]:
        return {found.worker: found.error for found in self.receipts if found.state == "refused"}

    def _in_state(self, state: rest.ReceiptState) -> tuple[str, ...]:
        return tuple(found.worker for found in self.receipts if found.state == state)

    def refresh(self, *, wait_s: float = 0.0) -> "Update":
        """Ask how far it is; the head answers at once, or when it ended within `wait_s`."""
        path = f"/v1/updates/{quoted(self.answer.update_id)}"
        self.answer = self._head.get(rest.Update, path, params={"wait": wait_s or None}, wait_s=wait_s)
        return self

    def wait(self, timeout: float = 30.0) -> "Update":
        """As `Receipt.wait`.

        Raises:
            UpdateFailed: workers refused them, or not all act with them in time; names those.
            HeadUnreachable: the head was unreachable for longer than `reconnect_s`. Publishing
                them again under the same version is safe.
        """
        until = time.monotonic() + timeout
        while self.answer.state not in rest.FINAL_STATES and not self.refused:
            left = until - time.monotonic()
            if left <= 0:
                raise UpdateFailed(
                    f"version {self.version} is {self.state} after {timeout:g} s: {self.answer.workers.acked} of "
                    f"{self.answer.workers.total} workers act with it{_named(self.waiting)}; "
                    "wait longer, or look at /v1/workers"
                )
            try:
                self.refresh(wait_s=min(left, _LONGEST_POLL_S))
            except NotFound as error:
                raise UpdateFailed(
                    f"the head was replaced and does not know version {self.version}; publish the weights again"
                ) from error
        if self.answer.state == "failed" or self.refused:
            refused = [f"{worker}: {error}" for worker, error in self.refused.items()]
            raise UpdateFailed(
                f"version {self.version} failed: {self.answer.error or 'not every worker took it'}{_named(refused)}"
            )
        if self.answer.superseded_by is not None:  # workers may not act with the newer one yet
            answer = self._head.get(rest.Update, f"/v1/updates/u{self.answer.superseded_by}")
            Update(self._head, answer).wait(max(0.0, until - time.monotonic()))
        return self

    def __repr__(self) -> str:
        workers = self.answer.workers
        return f"Update(version={self.version}, state={self.state!r}, workers={workers.acked}/{workers.total})"


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else ""
