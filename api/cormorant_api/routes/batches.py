"""Batches for learners anywhere: each at least once, shared by all consumers, acknowledged."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cormorant_api.batches.memory_batch import describe_memory, reading_of
from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.tokens import Role
from cormorant_api.http.transfer import BufferResponse, Hangup
from cormorant_api.routes.batch_stream import BatchStream
from cormorant_api.routes.lending import find_batch, lend_next, oldest_wanted, stream_ended
from cormorant_api.routes.routing import BINARY, LONGEST_WAIT_S, GuardedRoute, answers, head_of, needs
from cormorant_contract.rest.base import Name
from cormorant_contract.rest.headers import (
    ACK_WITHIN,
    BATCH_ID,
    BATCH_STREAM,
    DELIVERY,
    FRAMES,
    MAX_VERSION,
    MEMORY_JSON,
    MIN_VERSION,
    SAFETENSORS,
)
from cormorant_contract.rest.problems import ProblemType
from cormorant_worker.wire import encode

_HEADERS = {
    name: {"schema": {"type": "string"}, "description": text}
    for name, text in (
        (BATCH_ID, "For its acknowledgement."),
        (FRAMES, "Frames in it."),
        (MIN_VERSION, "Oldest policy version that acted; -1 for random frames."),
        (MAX_VERSION, "Newest policy version that acted."),
        (DELIVERY, "1 for the first time that it is handed out."),
        (ACK_WITHIN, "Seconds after which it goes to the next consumer."),
    )
}
Consumer = Annotated[Name, Query(description="Who asks; for /v1/status.")]
Staleness = Annotated[
    int | None,
    Query(
        ge=0, le=2**31, description="Throw batches away that are more versions old than this; they count as dropped."
    ),
]
Ack = Annotated[str, Query(pattern="^(auto|manual)$")]
router = APIRouter(route_class=GuardedRoute, tags=["batches"])


@router.get(
    "/v1/batches/next",
    operation_id="next_batch",
    response_class=Response,
    responses=answers(
        ProblemType.NO_QUEUE,
        ProblemType.STREAM_ENDED,
        also={
            200: {
                "description": "A batch. Acknowledge it, or it is handed out again.",
                "content": {
                    SAFETENSORS: BINARY,
                    MEMORY_JSON: {"schema": {"$ref": "#/components/schemas/MemoryBatch"}},
                },
                "headers": _HEADERS,
            },
            204: {"description": "None came in time; ask again."},
        },
    ),
    openapi_extra=needs(Role.READ),
)
async def next_batch(
    request: Request,
    consumer: Consumer = "anonymous",
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait for one.")] = 10.0,
    ack: Ack = "manual",
    max_staleness: Staleness = None,
) -> Response:
    """The next batch. `Accept: application/vnd.cormorant.memory+json`: where it lies in this machine's memory.

    `ack=auto` acknowledges it once its last byte is sent, for shells: at most once. What lies in memory is never
    acknowledged so.
    """
    head = _with_queue(request)
    running = head.running
    oldest = await oldest_wanted(head, max_staleness)
    async with Hangup(request.receive, notifier=running.ledger.notifier) as hangup:
        lent = await lend_next(head, consumer, wait_s=wait, oldest_version=oldest, hangup=hangup)
    if lent is None:
        return Response(status_code=204)
    ledger = running.ledger
    try:
        batch = await head.bulk(encode, lent.loan, batch_id=lent.id, delivery=lent.delivery)
        headers = {
            BATCH_ID: lent.id,
            FRAMES: str(lent.loan.num_frames),
            MIN_VERSION: str(lent.loan.min_version),
            MAX_VERSION: str(lent.loan.max_version),
            DELIVERY: str(lent.delivery),
            ACK_WITHIN: f"{ledger.ack_within_s:g}",
            "Cache-Control": "no-store",
        }
        if MEMORY_JSON in request.headers.get("accept", ""):
            described, extra = describe_memory(lent, batch, ack_within_s=ledger.ack_within_s)
            ledger.attach(lent.id, extra, is_read=reading_of(lent.loan))
            ledger.sent(lent.id)
            head.metrics.handed_over("memory", batch.size_bytes)
            return Response(described.model_dump_json(), media_type=MEMORY_JSON, headers=headers)
    except BaseException:
        ledger.release(lent.id)
        ledger.sent(lent.id)
        raise

    def over(is_whole: bool) -> None:
        ledger.sent(lent.id)
        if is_whole:
            head.metrics.handed_over("http", batch.size_bytes)
        if not is_whole:
            ledger.release(lent.id)
        elif ack == "auto":
            ledger.ack(lent.id)

    return BufferResponse(
        [memoryview(batch.header), *batch.buffers],
        media_type=SAFETENSORS,
        headers=headers,
        stall_timeout_s=head.settings.stall_timeout_s,
        on_end=over,
    )


@router.get(
    "/v1/batches",
    operation_id="stream_batches",
    response_class=Response,
    responses=answers(
        ProblemType.NO_QUEUE,
        ProblemType.STREAM_ENDED,
        also={
            200: {
                "description": "An endless stream: 8 bytes with a batch's length, little-endian; the batch; and so on.",
                "content": {BATCH_STREAM: BINARY},
            }
        },
    ),
    openapi_extra=needs(Role.READ),
)
async def stream_batches(
    request: Request,
    consumer: Consumer = "anonymous",
    ack: Ack = "manual",
    max_staleness: Staleness = None,
) -> Response:
    """A stream without end on one connection, for programs that read on and on; `GET /v1/batches/next` gives one batch.
    `ack=auto` acknowledges each when the next one begins to be sent.
    """
    head = _with_queue(request)
    if head.running.ledger.has_ended:
        raise await stream_ended(head)
    return BatchStream(head, consumer=consumer, acks=ack == "auto", max_staleness=max_staleness)


@router.post(
    "/v1/batches/{batch}/ack",
    operation_id="ack_batch",
    status_code=204,
    response_class=Response,
    responses=answers(ProblemType.UNKNOWN_BATCH),
    openapi_extra=needs(Role.READ),
)
async def ack_batch(request: Request, batch: str) -> Response:
    """The batch was used: it is never handed out again. May be repeated."""
    find_batch(batch, is_known=head_of(request).running.ledger.ack(batch))
    return Response(status_code=204)


@router.post(
    "/v1/batches/{batch}/release",
    operation_id="release_batch",
    status_code=204,
    response_class=Response,
    responses=answers(ProblemType.UNKNOWN_BATCH),
    openapi_extra=needs(Role.READ),
)
async def release_batch(request: Request, batch: str) -> Response:
    """The batch was not used: the next consumer gets it, at once."""
    find_batch(batch, is_known=head_of(request).running.ledger.release(batch))
    return Response(status_code=204)


def _with_queue(request: Request) -> Head:
    head = head_of(request)
    if not head.has_queue:
        raise ApiError(
            409, ProblemType.NO_QUEUE, "the manifest has no output.queue: its frames go to the dataset; add queue: {}"
        )
    return head
