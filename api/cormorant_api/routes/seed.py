"""A new seed for the whole fleet."""

import asyncio

from fastapi import APIRouter, Request

from cormorant_api.errors import ApiError
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import GuardedRoute, answers, author_of, head_of, log, needs
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.seed import Reseed, Seeded

router = APIRouter(route_class=GuardedRoute, tags=["lifecycle"])


@router.post(
    "/v1/seed", operation_id="seed", responses=answers(ProblemType.STREAM_ENDED), openapi_extra=needs(Role.WRITE)
)
async def seed(request: Request, body: Reseed) -> Seeded:
    """Every worker begins anew at its next batch boundary, with environments and random streams of this seed.

    Answers when all have. Batches under way are finished first, also under a pause, which holds on. Open trajectories
    end where their last batch did; weights, versions and the count of frames stay.
    """
    head = head_of(request)
    head.refuse_changes_while_draining()
    fleet = head.running.fleet
    if await head.quick(lambda: fleet.is_done):
        raise ApiError(410, ProblemType.STREAM_ENDED, "all frames are collected; there is nothing left to seed")
    # A client that goes away changes nothing: half of the workers would have begun anew.
    workers = await asyncio.shield(head.bulk(fleet.seed, body.seed))
    log.info("fleet_seeded", seed=body.seed, workers=len(workers), who=author_of(request))
    return Seeded(seed=body.seed, workers=workers)
