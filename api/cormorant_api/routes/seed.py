"""Reseed the whole fleet."""

import asyncio

from fastapi import APIRouter, Request

from cormorant_api.errors import ApiError
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import GuardedRoute, author_of, guarded, head_of, log
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.seed import Reseed, Seeded

router = APIRouter(route_class=GuardedRoute, tags=["lifecycle"])


@router.post("/v1/seed", **guarded(Role.WRITE, ProblemType.STREAM_ENDED, ProblemType.STATE_MISMATCH))
async def seed(request: Request, body: Reseed) -> Seeded:
    """Restart every worker's environments and random streams with this seed, at the next batch boundary.

    Responds when all workers have. Open batches are finished first, even during a pause, which stays in force. Open
    trajectories end with their last batch; weights, versions and the frame count stay.
    """
    head = head_of(request)
    head.refuse_changes_while_draining()
    fleet = head.running.fleet
    if await head.quick(lambda: fleet.is_done):
        raise ApiError(ProblemType.STREAM_ENDED, "all frames are collected; no worker is left to seed")
    # Shielded: a client that disconnects must not leave half of the workers with the old seed.
    workers = await asyncio.shield(head.at_boundary(fleet.seed, body.seed))
    log.info("fleet_seeded", seed=body.seed, workers=len(workers), who=author_of(request))
    return Seeded(seed=body.seed, workers=workers)
