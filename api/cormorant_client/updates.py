"""A publish that the head has: what became of it, and waiting for the workers."""

import time
from collections.abc import Sequence

from cormorant_client.errors import NotFound, UpdateFailed
from cormorant_client.head import HeadConnection, quoted
from cormorant_contract.rest import updates as rest

_LONGEST_POLL_S = 20.0


class Update:
    """What became of a publish. Properties are as of the last answer; `wait` and `refresh` ask again."""

    def __init__(self, head: HeadConnection, answer: rest.Update) -> None:
        self._head = head
        self.answer = answer
        """The whole answer."""

    @property
    def version(self) -> int:
        """Policy version assigned to the weights."""
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
        """Workers that act with this version or a newer one."""
        return self._in_state("applied")

    @property
    def waiting(self) -> tuple[str, ...]:
        """Workers that have it staged for their next batch."""
        return self._in_state("waiting")

    @property
    def refused(self) -> dict[str, str]:
        """Why workers refused it, by name."""
        return {found.worker: found.error for found in self.receipts if found.state == "refused"}

    def _in_state(self, state: rest.ReceiptState) -> tuple[str, ...]:
        return tuple(found.worker for found in self.receipts if found.state == state)

    def refresh(self, *, wait_s: float = 0.0) -> "Update":
        """Ask how far it is; the head answers at once, or when it ended within `wait_s`."""
        path = f"/v1/updates/{quoted(self.answer.update_id)}"
        self.answer = self._head.get(rest.Update, path, params={"wait": wait_s or None}, wait_s=wait_s)
        return self

    def wait(self, timeout: float = 30.0) -> "Update":
        """Wait until every worker uses these weights or newer ones.

        Raises:
            UpdateFailed: no worker took them, or not all did in time; names those that are missing.
            HeadUnreachable: the head was unreachable for longer than `reconnect_s`. Publishing
                them again under the same version is safe.
        """
        until = time.monotonic() + timeout
        while self.answer.state not in rest.FINAL_STATES:
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
        if self.answer.state == "failed":
            refused = [f"{worker}: {error}" for worker, error in self.refused.items()]
            raise UpdateFailed(
                f"version {self.version} failed: {self.answer.error or 'no worker took it'}{_named(refused)}"
            )
        return self

    def __repr__(self) -> str:
        workers = self.answer.workers
        return f"Update(version={self.version}, state={self.state!r}, workers={workers.acked}/{workers.total})"


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else ""
