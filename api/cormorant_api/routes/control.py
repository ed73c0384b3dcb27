"""Requests of the operator: group sizes and drain."""

from fastapi import APIRouter, Request

from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import GuardedRoute, TheHead, author_of, guarded, log
from cormorant_contract.rest.control import Desired, DesiredReport, DrainReport
from cormorant_contract.rest.problems import ProblemType

router = APIRouter(route_class=GuardedRoute, tags=["operator"])


@router.put("/v1/desired", **guarded(Role.OPERATOR, ProblemType.LAST_WORKER))
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


@router.post("/v1/drain", status_code=202, **guarded(Role.OPERATOR))
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
