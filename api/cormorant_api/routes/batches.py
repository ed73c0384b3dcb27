"""Batches for learners: shared by all consumers, delivered at least once, acknowledged. A consumer on the head's
machine may map a batch's shared memory instead of downloading it.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.bodies import LEAVING_KEY, memory_response, while_connected
from cormorant_api.http.problems import as_api_error
from cormorant_api.http.tokens import Role
from cormorant_api.ledger import Entry
from cormorant_api.routes.routing import BINARY, GuardedRoute, TheHead, guarded
from cormorant_contract.rest.base import (
    ACK_WITHIN,
    BATCH_ID,
    DELIVERY,
    FRAMES,
    MAX_VERSION,
    MEMORY_JSON,
    MIN_VERSION,
    SAFETENSORS,
    SETTLED,
    Name,
)
from cormorant_contract.rest.batches import MemoryBatch, MemoryPart, MemoryTensor
from cormorant_contract.rest.control import LONGEST_WAIT_S
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.tensor_file import parse_header
from cormorant_worker.fleet.batch_file import encode
from cormorant_worker.wire import SharedMemory

_HEADERS = {
    name: {"schema": {"type": "string"}, "description": text}
    for name, text in (
        (BATCH_ID, "Batch id; use it to acknowledge or release the batch."),
        (FRAMES, "Number of frames."),
        (MIN_VERSION, "Oldest policy version that acted; -1 for random frames."),
        (MAX_VERSION, "Newest policy version that acted."),
        (DELIVERY, "How often the batch has been delivered, from 1."),
        (ACK_WITHIN, "Seconds to acknowledge the batch before it goes to the next consumer."),
    )
}
_RECEIPT = {
    SETTLED: {
        "schema": {"type": "string"},
        "description": "What is settled; send it with the next request for a batch, in case another head answers it.",
    }
}
Consumer = Annotated[Name, Query(description="Name of the consumer, shown in /v1/status.")]
Staleness = Annotated[
    int | None,
    Query(ge=0, le=2**31, description="Drop batches that are more than this many versions old; they count as dropped."),
]
_KEPT_WITHIN_S = 30.0
"""How long an acknowledgement waits for the disk before the consumer must repeat it."""
_AGAIN_S = 2.0
Delivery = Annotated[int, Query(ge=1, description="Number of the delivery to give back, from `Cormorant-Delivery`.")]
router = APIRouter(route_class=GuardedRoute, tags=["batches"])


@router.get(
    "/v1/batches/next",
    response_class=Response,
    **guarded(
        Role.READ,
        ProblemType.NO_QUEUE,
        ProblemType.STREAM_ENDED,
        also={
            200: {
                "description": "A batch. An unacknowledged batch is delivered again.",
                "content": {
                    SAFETENSORS: BINARY,
                    MEMORY_JSON: {"schema": {"$ref": "#/components/schemas/MemoryBatch"}},
                },
                "headers": _HEADERS,
            },
            204: {"description": "No batch within `wait`; ask again."},
        },
    ),
)
async def next_batch(
    request: Request,
    head: TheHead,
    consumer: Consumer = "anonymous",
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait for a batch.")] = 10.0,
    max_staleness: Staleness = None,
    settled: Annotated[str, Header(alias=SETTLED, description="From the consumer's last acknowledgement.")] = "",
) -> Response:
    """Take the next batch. With `Accept: application/vnd.cormorant.memory+json` the response is its location in shared
    memory, for consumers on the head's machine; on Ray, whose objects no other process maps, it is the batch itself.
    """
    if not head.has_queue:
        raise ApiError(
            ProblemType.NO_QUEUE,
            "the job has no output.queue, its frames go to the dataset only; add output.queue: {} to the manifest",
        )
    running = head.running
    if settled and not settled.startswith(f"{head.journal.epoch}."):  # skip this head's own receipts
        await head.quick(head.inherit, settled)
    is_leaving = request.scope["state"][LEAVING_KEY]
    lending = _lend_next(head, consumer, wait_s=wait, max_staleness=max_staleness, is_leaving=is_leaving)
    lent = await while_connected(request.receive, lending)
    if lent is None:
        return Response(status_code=204)
    ledger = running.ledger

    path, media_type = "http", SAFETENSORS

    def over(is_complete: bool) -> None:
        ledger.sent(lent.id)
        if is_complete:
            head.metrics.handed_over(path, sum(map(len, file)))
        else:
            ledger.release(lent.id, lent.delivery)

    try:
        buffers = file = await head.bulk(encode, lent.loan, batch_id=lent.id, delivery=lent.delivery)
        headers = {
            BATCH_ID: lent.id,
            FRAMES: str(lent.loan.num_frames),
            MIN_VERSION: str(lent.loan.min_version),
            MAX_VERSION: str(lent.loan.max_version),
            DELIVERY: str(lent.delivery),
            ACK_WITHIN: f"{ledger.ack_within_s:g}",
            "Cache-Control": "no-store",
            **(lent.trace.headers if lent.trace is not None else {}),
        }
        memories = [part.memory for part in lent.loan.parts if part.memory is not None]
        # Without one of them, another process of this machine could not map the batch.
        is_mappable = memories and len(memories) == len(lent.loan.parts)
        if MEMORY_JSON in request.headers.get("accept", "") and is_mappable:
            described = _describe_memory(lent, file, memories, ack_within_s=ledger.ack_within_s)
            # Consumers hold a shared lock on each part that they map.
            ledger.attach(lent.id, is_read=lambda: any(_is_locked(memory.descriptor) for memory in memories))
            path, media_type = "memory", MEMORY_JSON
            buffers = [memoryview(described.model_dump_json().encode())]
    except BaseException:
        over(False)
        raise
    return memory_response(
        buffers,
        media_type=media_type,
        headers=headers,
        stall_timeout_s=head.settings.stall_timeout_s,
        on_end=over,
    )


@router.post(
    "/v1/batches/{batch}/ack",
    status_code=204,
    response_class=Response,
    **guarded(
        Role.READ,
        ProblemType.UNKNOWN_BATCH,
        ProblemType.STORE_FAILED,
        also={204: {"description": "It is acknowledged.", "headers": _RECEIPT}},
    ),
)
async def ack_batch(head: TheHead, batch: str) -> Response:
    """Acknowledge a batch: it is never delivered again. Idempotent. Any consumer may acknowledge any batch."""
    kept = head.running.ledger.ack(batch)
    if kept is None:
        raise _unknown_batch(batch)
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(kept)), _KEPT_WITHIN_S)
    except TimeoutError:
        raise ApiError(
            ProblemType.STORE_FAILED,
            f"the acknowledgement of {batch} was not written down within {_KEPT_WITHIN_S:g} s, because the disk of the "
            "head's directory does not answer; repeat it",
            retry_after_s=_AGAIN_S,
        ) from None
    return Response(status_code=204, headers={SETTLED: receipt} if (receipt := head.receipt) else None)


@router.post(
    "/v1/batches/{batch}/release",
    status_code=204,
    response_class=Response,
    **guarded(Role.READ, ProblemType.UNKNOWN_BATCH),
)
async def release_batch(head: TheHead, batch: str, delivery: Delivery) -> Response:
    """Return a batch unused: the next consumer gets it immediately. Has no effect on a later delivery."""
    if not head.running.ledger.release(batch, delivery):
        raise _unknown_batch(batch)
    return Response(status_code=204)


async def _lend_next(
    head: Head, consumer: str, *, wait_s: float, max_staleness: int | None, is_leaving: Callable[[], bool]
) -> Entry | None:
    """The next batch for a consumer; None after `wait_s`, or where it is leaving.

    Call the ledger's `sent` when its memory is no longer read.

    Raises:
        ApiError: 410, all batches are delivered and acknowledged; 503, the next head continues, the fleet failed, or
        the head is closing.
    """
    running = head.running
    ledger, feeder, fleet = running.ledger, running.feeder, running.fleet

    def look() -> Entry | bool:
        if is_leaving() or head.is_closing or ledger.has_ended or feeder.error is not None:
            return True
        # Weights may be published during the wait. A batch that was given back may be too old for the job, too.
        asked = 0 if max_staleness is None else fleet.version - max_staleness
        lent = ledger.lend(consumer, oldest_version=max(asked, fleet.oldest_version or 0))
        return lent or ledger.has_ended  # the last batch may have been too old

    with feeder.demand():
        found = await ledger.notifier.wait_for(look, timeout_s=wait_s)
    if isinstance(found, Entry):
        return found
    if ledger.has_ended:
        head.refuse_while_closing()
        total = head.job.spec.target
        if head.is_draining and (total is None or (await head.stats(workers=False)).frames < total):
            raise ApiError(
                ProblemType.DRAINING,
                "the head is draining and has delivered all its batches; the next head continues",
                retry_after_s=2.0,
            )
        raise ApiError(ProblemType.STREAM_ENDED, "all batches are delivered and acknowledged")
    if feeder.error is not None:
        raise as_api_error(feeder.error)
    head.refuse_while_closing()
    return None


def _unknown_batch(batch_id: str) -> ApiError:
    return ApiError(
        ProblemType.UNKNOWN_BATCH,
        f"unknown batch id {batch_id[:80]!r}; ids issued before a restart of the head are unknown",
    )


def _describe_memory(
    lent: Entry, file: Sequence[memoryview], memories: Sequence[SharedMemory], *, ack_within_s: float
) -> MemoryBatch:
    """Locate every tensor of a batch's file in the memory of its part, whose number begins the tensor's name."""
    parsed = parse_header(file[0], file_size=sum(map(len, file)))
    bases = [_address(memory.buffer) for memory in memories]
    tensors: list[dict[str, MemoryTensor]] = [{} for _ in memories]
    for (name, entry), data in zip(parsed.tensors.items(), file[1:], strict=True):
        part = int(name.partition("/")[0])
        offset = _address(data) - bases[part]
        tensors[part][name] = MemoryTensor(dtype=entry.dtype, shape=entry.shape, offset=offset)
    return MemoryBatch(
        id=lent.id,
        frames=lent.loan.num_frames,
        min_version=lent.loan.min_version,
        max_version=lent.loan.max_version,
        delivery=lent.delivery,
        ack_within_s=ack_within_s,
        lent_at=lent.lent_at,
        metadata=dict(parsed.metadata),
        parts=tuple(
            MemoryPart(path=f"/proc/{os.getpid()}/fd/{memory.descriptor}", size_bytes=memory.size_bytes, tensors=found)
            for memory, found in zip(memories, tensors, strict=True)
        ),
    )


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # its memory was closed with the fleet
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
