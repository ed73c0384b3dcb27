"""Requests of the operator: group sizes and drain."""

from fastapi import APIRouter, Request

from cormorant_api.head import Head
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import GuardedRoute, author_of, guarded, head_of, log
from cormorant_contract.rest.control import Desired, DesiredReport, DrainReport
from cormorant_contract.rest.problems import ProblemType

router = APIRouter(route_class=GuardedRoute, tags=["operator"])


@router.get("/v1/desired", **guarded(Role.READ))
async def get_desired(request: Request) -> DesiredReport:
    """Desired number of workers per group."""
    return _describe(head_of(request))


@router.put("/v1/desired", **guarded(Role.OPERATOR, ProblemType.LAST_WORKER))
async def put_desired(request: Request, body: Desired) -> DesiredReport:
    """Set group sizes and the current `spec.paused`. `pending` is true while workers are being started or retired."""
    head = head_of(request)
    running = head.running
    if body.groups:
        running.group_sizes.want(body.groups, empty_slots=body.empty_slots)
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
    return _describe(head)


@router.post("/v1/drain", status_code=202, **guarded(Role.OPERATOR))
async def drain(request: Request) -> DrainReport:
    """Start no new batches. Open batches are finished and can be taken; then the stream ends. Idempotent."""
    head = head_of(request)
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


def _describe(head: Head) -> DesiredReport:
    running = head.running
    return running.group_sizes.describe(paused=running.pauses.spec_paused)
