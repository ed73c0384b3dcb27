"""Pause leases, with shorthands for people; and the operator's requests: group sizes and drain."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from cormorant_api.control.leases import Lease
from cormorant_api.head import Head
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import GuardedRoute, TheHead, author_of, guarded, log
from cormorant_contract.rest.control import (
    Desired,
    DesiredReport,
    DrainReport,
    PauseLease,
    PauseRequest,
    Pauses,
    ResumeRequest,
)
from cormorant_contract.rest.problems import ProblemType

router = APIRouter(route_class=GuardedRoute, tags=["lifecycle"])
operator = APIRouter(route_class=GuardedRoute, tags=["operator"])

_RESUME_WITHIN_S = 10.0


@router.post(
    "/v1/pauses",
    response_model=PauseLease,
    **guarded(Role.WRITE, also={201: {"model": PauseLease, "description": "A new lease."}}),
)
async def create_pause(request: Request, head: TheHead, body: PauseRequest | None = None) -> Response:
    """Take a pause lease: the fleet is paused while any lease is held. The same owner renews its lease (200)."""
    lease, is_new = await _pause(request, head, body or PauseRequest())
    described = head.running.pauses.describe_lease(lease)
    return JSONResponse(
        described.model_dump(mode="json"),
        status_code=201 if is_new else 200,
        headers={"Location": f"/v1/pauses/{lease.id}"},
    )


@router.get("/v1/pauses", **guarded(Role.READ))
async def list_pauses(head: TheHead) -> Pauses:
    """All pause leases and the state of the fleet."""
    return head.running.pauses.describe()


@router.delete("/v1/pauses/{lease}", status_code=204, response_class=Response, **guarded(Role.WRITE))
async def end_pause(request: Request, head: TheHead, lease: str) -> Response:
    """End a lease. The fleet resumes when the last lease ends. Idempotent."""
    await _ended(request, head, head.running.pauses.end(lease))
    return Response(status_code=204)


@router.post("/v1/pause", **guarded(Role.WRITE))
async def pause(request: Request, head: TheHead, body: PauseRequest | None = None) -> Pauses:
    """Pause the fleet: take a lease, by default for the owner "default"."""
    await _pause(request, head, body or PauseRequest())
    return head.running.pauses.describe()


@router.post("/v1/resume", **guarded(Role.WRITE))
async def resume(request: Request, head: TheHead, body: ResumeRequest | None = None) -> Pauses:
    """End the lease of an owner (default: "default"). Leases of other owners stay."""
    pauses = head.running.pauses
    await _ended(request, head, pauses.end_of((body or ResumeRequest()).owner))
    return pauses.describe()


@operator.put("/v1/desired", **guarded(Role.OPERATOR, ProblemType.LAST_WORKER))
async def put_desired(request: Request, head: TheHead, body: Desired) -> DesiredReport:
    """Set group sizes and the current `spec.paused`. `pending` is true while workers are being retired."""
    running = head.running
    if body.groups:
        await head.quick(running.group_sizes.want, body.groups, empty_slots=body.empty_slots)
    if body.paused is not None:
        running.pauses.spec_paused = body.paused
        running.pauses.nudge()
    log.info(
        "desired_changed",
        groups=body.groups,
        empty_slots=body.empty_slots,
        paused=body.paused,
        who=author_of(request),
    )
    return running.group_sizes.describe(await head.stats(workers=False), paused=running.pauses.spec_paused)


@operator.post("/v1/drain", status_code=202, **guarded(Role.OPERATOR))
async def drain(request: Request, head: TheHead) -> DrainReport:
    """Start no new batches. Open batches are finished and can be taken; then the stream ends. Idempotent."""
    running = head.running
    if not head.is_draining:
        log.info("drain_began", who=author_of(request))
    await head.bulk(head.drain)
    counts, stats = running.ledger.counts(), await head.stats(workers=False)
    return DrainReport(
        draining=True,
        waiting_batches=stats.queued_batches + counts.ready,
        lent_batches=counts.lent,
        ended=running.ledger.has_ended,
    )


async def _pause(request: Request, head: Head, wanted: PauseRequest) -> tuple[Lease, bool]:
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
