"""Waits for a batch on behalf of a connected consumer."""

from cormorant_api.batches.ledger import Lent
from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.problems import as_api_error
from cormorant_api.http.transfer import Hangup
from cormorant_contract.rest.problems import ProblemType


async def lend_next(
    head: Head, consumer: str, *, wait_s: float, oldest_version: int | None, hangup: Hangup
) -> Lent | None:
    """The next batch for a consumer; None after `wait_s` or when the consumer has disconnected.

    Call the ledger's `sent` when its memory is no longer read.

    Raises:
        ApiError: 410, all are delivered and acknowledged; 503, the fleet failed or the head is closing.
    """
    running = head.running
    ledger, feeder = running.ledger, running.feeder
    found: list[Lent] = []

    def look() -> bool:
        if head.is_closing or hangup.happened.is_set() or ledger.has_ended or feeder.error is not None:
            return True
        if (lent := ledger.lend(consumer, oldest_version=oldest_version)) is not None:
            found.append(lent)
        return bool(found)

    with feeder.demand():
        await ledger.notifier.wait_for(look, timeout_s=wait_s)
    if found:
        return found[0]
    if ledger.has_ended:
        raise await stream_ended(head)
    if feeder.error is not None:
        raise as_api_error(feeder.error)
    head.refuse_while_closing()
    return None


async def stream_ended(head: Head) -> ApiError:
    """The error after the last batch: 410 if the job is complete, 503 if the next head continues it."""
    head.refuse_while_closing()
    if await head.quick(lambda: head.is_cut_short):
        return ApiError(
            ProblemType.DRAINING,
            "the head is draining and has delivered all its batches; the next head continues",
            retry_after_s=2.0,
        )
    return ApiError(ProblemType.STREAM_ENDED, "all batches are delivered and acknowledged")


def oldest_wanted(head: Head, max_staleness: int | None) -> int | None:
    """The oldest policy version that a consumer accepts; None: any."""
    return None if max_staleness is None else max(0, head.running.fleet.version - max_staleness)


def unknown_batch(batch_id: str) -> ApiError:
    return ApiError(
        ProblemType.UNKNOWN_BATCH,
        f"unknown batch id {batch_id[:80]!r}; ids issued before a restart of the head are unknown",
    )
