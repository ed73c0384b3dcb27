"""The fleet's state and its seed, at a batch boundary: everything needed to continue collecting, or to begin again."""

import asyncio
import itertools
import time
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.tokens import Role
from cormorant_api.http.transfer import memory_response
from cormorant_api.http.uploads import parse_body, receive, size_of_body
from cormorant_api.routes.routing import BINARY, GuardedRoute, TheHead, author_of, guarded, log
from cormorant_api.status import describe
from cormorant_contract.rest.base import SAFETENSORS
from cormorant_contract.rest.control import Reseed, Seeded
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.status import Status
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.weights.blob import WeightsBlob

_PAUSE_WITHIN_S = 90.0
_LEASE_S = 600.0
_COPIES = 2
"""Copies of a state in memory: the body, and what the fleet shares with its workers."""
_numbers = itertools.count(1)
router = APIRouter(route_class=GuardedRoute, tags=["lifecycle"])


@router.get(
    "/v1/state",
    response_class=Response,
    **guarded(
        Role.WRITE,
        ProblemType.STATE_MISMATCH,
        also={200: {"description": "The state, as safetensors.", "content": {SAFETENSORS: BINARY}}},
    ),
)
async def get_state(head: TheHead) -> Response:
    """Save every collector's state, the weights and the frame count at a batch boundary. The head pauses the fleet for
    it.

    Unacknowledged batches are counted but not saved: pause and take them first.
    """
    state = await _paused(head, "cormorant/get-state", head.running.fleet.state)
    return memory_response([memoryview(state)], media_type=SAFETENSORS, headers={"Cache-Control": "no-store"})


@router.put(
    "/v1/state",
    **guarded(
        Role.WRITE,
        ProblemType.MALFORMED_SAFETENSORS,
        ProblemType.UPLOAD_STALLED,
        ProblemType.NOT_PAUSED,
        ProblemType.LENGTH_REQUIRED,
        ProblemType.UNSUPPORTED_FORMAT,
        ProblemType.UNSAFE_FORMAT,
        ProblemType.STATE_MISMATCH,
        ProblemType.BUSY,
        ProblemType.STORE_FAILED,
        requestBody={"required": True, "content": {SAFETENSORS: BINARY, "application/octet-stream": BINARY}},
    ),
)
async def put_state(request: Request, head: TheHead) -> Status:
    """Restore a saved state. The fleet must be paused, and stays paused."""
    running = head.running
    head.refuse_changes_while_draining()
    if not (running.pauses.wants_pause and running.pauses.is_settled):
        raise ApiError(ProblemType.NOT_PAUSED, "the fleet is running; POST /v1/pauses first, then restore")
    size = size_of_body(request, limit_bytes=head.settings.max_body_bytes)
    with head.uploads.of(_COPIES * size):
        body = memoryview(bytearray(size))
        received = await receive(request, body, stall_timeout_s=head.settings.stall_timeout_s)
        state = body.toreadonly()
        # Parsing a large state takes seconds; the event loop must stay free.
        await head.bulk(parse_body, state)  # 400 or 415 for what is not safetensors, before 422 for what is not a state
        saved = await head.bulk(FleetState.from_bytes, state)

        def restore() -> None:
            running.fleet.restore(state)
            head.keep_restored()
            # Workers use the restored weights now, so GET of weights must return them.
            found = dict[int, WeightsBlob]()
            with suppress(CormorantError):  # the fleet accepted the state but did not need its weights
                found = saved.publishes(after=running.publisher.store.newest)
            for version, blob in found.items():
                running.publisher.adopt(blob, version, author=author_of(request))

        await _paused(head, "cormorant/put-state", restore)
    log.info("state_restored", digest=received.digest, bytes=len(state), who=author_of(request))
    return describe(head, await head.stats(workers=False))


@router.post("/v1/seed", **guarded(Role.WRITE, ProblemType.STREAM_ENDED, ProblemType.STATE_MISMATCH))
async def seed(request: Request, head: TheHead, body: Reseed) -> Seeded:
    """Restart every worker's environments and random streams with this seed, at the next batch boundary.

    Responds when all workers have. Open batches are finished first, even during a pause, which stays in force. Open
    trajectories end with their last batch; weights, versions and the frame count stay.
    """
    head.refuse_changes_while_draining()
    fleet = head.running.fleet
    if await head.quick(lambda: fleet.is_done):
        raise ApiError(ProblemType.STREAM_ENDED, "all frames are collected; no worker is left to seed")
    # Shielded: a client that disconnects must not leave half of the workers with the old seed.
    workers = await asyncio.shield(head.at_boundary(fleet.seed, body.seed))
    log.info("fleet_seeded", seed=body.seed, workers=len(workers), who=author_of(request))
    return Seeded(seed=body.seed, workers=workers)


async def _paused(head: Head, owner: str, call: Any) -> Any:
    """Run `call` under a pause lease of its own."""
    pauses = head.running.pauses
    lease, _ = pauses.grant(f"{owner}-{next(_numbers)}", reason="saving or restoring the state", ttl_s=_LEASE_S)
    try:
        began = time.monotonic()
        is_paused = await pauses.notifier.wait_for(
            lambda: head.is_closing or pauses.state == "paused", timeout_s=_PAUSE_WITHIN_S
        )
        if not is_paused:
            raise ApiError(
                ProblemType.CONTROL_TIMEOUT,
                f"the fleet did not pause within {time.monotonic() - began:.0f} s; {pauses.error or 'retry'}",
            )
        return await asyncio.shield(head.at_boundary(call))
    finally:
        pauses.end(lease.id)
