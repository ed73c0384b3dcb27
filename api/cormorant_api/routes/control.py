"""Pause leases, with shorthands for people; the fleet's state and its seed, at a batch boundary: everything needed to
continue collecting, or to begin again; and the operator's requests: group sizes and drain.
"""

import asyncio
import itertools
import time
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from cormorant_api.control.leases import Lease
from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.bodies import memory_response, parse_body, receive, size_of_body
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import BINARY, GuardedRoute, TheHead, author_of, guarded, log
from cormorant_api.status import describe
from cormorant_contract.rest import control
from cormorant_contract.rest.base import SAFETENSORS
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.status import Status
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.weights.blob import WeightsBlob

router = APIRouter(route_class=GuardedRoute, tags=["lifecycle"])
operator = APIRouter(route_class=GuardedRoute, tags=["operator"])

_RESUME_WITHIN_S = 10.0
_PAUSE_WITHIN_S = 90.0
_LEASE_S = 600.0
_numbers = itertools.count(1)


@router.post(
    "/v1/pauses",
    response_model=control.PauseLease,
    **guarded(Role.WRITE, also={201: {"model": control.PauseLease, "description": "A new lease."}}),
)
async def create_pause(request: Request, head: TheHead, body: control.PauseRequest | None = None) -> Response:
    """Take a pause lease: the fleet is paused while any lease is held. The same owner renews its lease (200)."""
    lease, is_new = await _pause(request, head, body or control.PauseRequest())
    described = head.running.pauses.describe_lease(lease)
    return JSONResponse(
        described.model_dump(mode="json"),
        status_code=201 if is_new else 200,
        headers={"Location": f"/v1/pauses/{lease.id}"},
    )


@router.get("/v1/pauses", **guarded(Role.READ))
async def list_pauses(head: TheHead) -> control.Pauses:
    """All pause leases and the state of the fleet."""
    return head.running.pauses.describe()


@router.delete("/v1/pauses/{lease}", status_code=204, response_class=Response, **guarded(Role.WRITE))
async def end_pause(request: Request, head: TheHead, lease: str) -> Response:
    """End a lease. The fleet resumes when the last lease ends. Idempotent."""
    await _ended(request, head, head.running.pauses.end(lease))
    return Response(status_code=204)


@router.post("/v1/pause", **guarded(Role.WRITE))
async def pause(request: Request, head: TheHead, body: control.PauseRequest | None = None) -> control.Pauses:
    """Pause the fleet: take a lease, by default for the owner "default"."""
    await _pause(request, head, body or control.PauseRequest())
    return head.running.pauses.describe()


@router.post("/v1/resume", **guarded(Role.WRITE))
async def resume(request: Request, head: TheHead, body: control.ResumeRequest | None = None) -> control.Pauses:
    """End the lease of an owner (default: "default"). Leases of other owners stay."""
    pauses = head.running.pauses
    await _ended(request, head, pauses.end_of((body or control.ResumeRequest()).owner))
    return pauses.describe()


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
    return memory_response(
        [memoryview(state)],
        media_type=SAFETENSORS,
        headers={"Cache-Control": "no-store"},
        stall_timeout_s=head.settings.stall_timeout_s,
    )


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
    head.refuse_while_closing(or_draining=True)
    if not (running.pauses.wants_pause and running.pauses.is_settled):
        raise ApiError(ProblemType.NOT_PAUSED, "the fleet is running; POST /v1/pauses first, then restore")
    size = size_of_body(request, limit_bytes=head.settings.max_body_bytes)
    with head.uploads.of(size):
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
            publishes = dict[int, WeightsBlob]()
            with suppress(CormorantError):  # the fleet accepted the state but did not need its weights
                publishes = saved.publishes(after=running.publisher.store.newest)
            for version, blob in publishes.items():
                running.publisher.adopt(blob, version, author=author_of(request))

        await _paused(head, "cormorant/put-state", restore)
    log.info("state_restored", digest=received.digest, bytes=len(state), who=author_of(request))
    return describe(head, await head.stats(workers=False))


@router.post("/v1/seed", **guarded(Role.WRITE, ProblemType.STREAM_ENDED, ProblemType.STATE_MISMATCH))
async def seed(request: Request, head: TheHead, body: control.Reseed) -> control.Seeded:
    """Restart every worker's environments and random streams with this seed, at the next batch boundary.

    Responds when all workers have. Open batches are finished first, even during a pause, which stays in force. Open
    trajectories end with their last batch; weights, versions and the frame count stay.
    """
    head.refuse_while_closing(or_draining=True)
    fleet = head.running.fleet
    if await head.quick(lambda: fleet.is_done):
        raise ApiError(ProblemType.STREAM_ENDED, "all frames are collected; no worker is left to seed")
    # Shielded: a client that disconnects must not leave half of the workers with the old seed.
    workers = await asyncio.shield(head.at_boundary(fleet.seed, body.seed))
    log.info("fleet_seeded", seed=body.seed, workers=len(workers), who=author_of(request))
    return control.Seeded(seed=body.seed, workers=workers)


@operator.put("/v1/desired", **guarded(Role.OPERATOR, ProblemType.LAST_WORKER))
async def put_desired(request: Request, head: TheHead, body: control.Desired) -> control.DesiredReport:
    """Set group sizes and the current `spec.paused`. `pending` is true while workers are being retired."""
    running = head.running
    if body.paused is not None:  # first: a size that the fleet refuses must not hold up a pause
        running.pauses.spec_paused = body.paused
        running.pauses.nudge()
    if body.groups:
        await head.quick(running.group_sizes.want, body.groups, empty_slots=body.empty_slots)
    log.info(
        "desired_changed",
        groups=body.groups,
        empty_slots=body.empty_slots,
        paused=body.paused,
        who=author_of(request),
    )
    return running.group_sizes.describe(await head.stats(workers=False), paused=running.pauses.spec_paused)


@operator.post("/v1/drain", status_code=202, **guarded(Role.OPERATOR))
async def drain(request: Request, head: TheHead) -> Status:
    """Start no new batches. Open batches are finished and can be taken; then the stream ends. Idempotent."""
    _ = head.running  # 503 before the first worker has started
    if not head.is_draining:
        log.info("drain_began", who=author_of(request))
    await head.bulk(head.drain)
    return describe(head, await head.stats(workers=False))


async def _pause(request: Request, head: Head, wanted: control.PauseRequest) -> tuple[Lease, bool]:
    lease, is_new = head.running.pauses.grant(wanted.owner, reason=wanted.reason, ttl_s=wanted.ttl_seconds)
    log.info(
        "pause_granted" if is_new else "pause_renewed",
        lease=lease.id,
        owner=lease.owner,
        reason=lease.reason,
        ttl_s=wanted.ttl_seconds,
        who=author_of(request),
    )
    await _settled(head, wanted.wait_seconds)
    return lease, is_new


async def _ended(request: Request, head: Head, lease: Lease | None) -> None:
    if lease is not None:
        log.info("pause_ended", lease=lease.id, owner=lease.owner, who=author_of(request))
        await _settled(head, _RESUME_WITHIN_S)


async def _settled(head: Head, wait_s: float) -> None:
    pauses = head.running.pauses
    await pauses.notifier.wait_for(lambda: head.is_closing or pauses.is_settled, timeout_s=wait_s)


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
