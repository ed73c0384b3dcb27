"""Status, workers, results of an evaluation, health."""

import asyncio
import time
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.tokens import Role
from cormorant_api.routes.routing import GuardedRoute, TheHead, guarded
from cormorant_api.status import describe, describe_worker
from cormorant_contract.metrics.labels import CONTENT_TYPE
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.status import Build, EvaluationTable, Readiness, SpacesReport, Status, Workers
from cormorant_contract.spaces import space_to_json
from cormorant_worker.errors import CormorantError

router = APIRouter(route_class=GuardedRoute, tags=["status"])
_FLEET_SILENT_S = 120.0
"""Silence of the fleet's thread that fails liveness. The thread iterates five times per second when idle; saving
gigabytes of state may take seconds.
"""
_LOOK_S = 0.05
health = APIRouter(route_class=GuardedRoute, tags=["health"])


@router.get("/v1/evaluation", response_model_exclude_defaults=True, **guarded(Role.READ, ProblemType.NOT_FOUND))
async def get_evaluation(head: TheHead) -> EvaluationTable:
    """Every episode with a durable result, and their summary. Episodes appear when their worker reports them."""
    book = head.running.fleet.episodes
    if book is None:
        raise ApiError(ProblemType.NOT_FOUND, "the job is not an evaluation; set collection.episodes in its manifest")
    table = await head.bulk(book.table)
    return EvaluationTable.model_validate(table.document())


@router.get("/v1/status", **guarded(Role.READ))
async def get_status(head: TheHead) -> Status:
    """Status of the whole job."""
    return describe(head, await head.stats(workers=False))


@router.get("/v1/spaces", **guarded(Role.READ))
async def get_spaces(head: TheHead) -> SpacesReport:
    """Observation and action space of one environment."""
    observation, action = head.running.fleet.spaces
    return SpacesReport(observation=space_to_json(observation), action=space_to_json(action))


@router.get("/v1/workers", **guarded(Role.READ))
async def list_workers(head: TheHead) -> Workers:
    """All workers."""
    stats = await head.stats()
    return Workers(workers=tuple(describe_worker(head, w, published=stats.version) for w in stats.workers))


@health.get(
    "/livez",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, 503: {"description": "The fleet's thread is stuck."}},
)
async def livez(head: TheHead) -> Response:
    """Liveness: the event loop and the fleet's thread are running."""
    silent_s = head.running.fleet.silent_s if head.is_running else 0.0
    if silent_s > _FLEET_SILENT_S:
        return Response(
            f"the fleet's thread has been stuck for {silent_s:.0f} s (limit {_FLEET_SILENT_S:.0f} s)\n",
            status_code=503,
            media_type="text/plain",
        )
    return Response("ok\n", media_type="text/plain")


@health.get(
    "/readyz",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Not ready."}},
)
async def readyz(head: TheHead, wait: Annotated[float, Query(ge=0, le=60)] = 0.0) -> Response:
    """Readiness. `?wait=SECONDS` waits that long for the first worker."""
    deadline = time.monotonic() + wait
    while not (head.is_running or head.is_closing or head.failure) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
    # A draining head stays ready: learners still take the last batches through the Service.
    reason = head.failure or ("the head is shutting down" if head.is_closing else "")
    if not (reason or head.is_running):
        reason = "the first worker has not started yet"
    body = Readiness(ready=not reason, reason=reason)
    return JSONResponse(body.model_dump(mode="json"), status_code=503 if reason else 200)


@health.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}},
)
async def get_metrics(head: TheHead) -> Response:
    """Metrics of the whole job, for Prometheus. No token needed: they reveal speed, not data."""
    # Not in the head's pools: long calls and shutdown must not delay a scrape.
    return Response(await asyncio.to_thread(scrape, head), headers={"Content-Type": CONTENT_TYPE})


@health.get("/version")
async def get_version() -> Build:
    """Version of the head and its API."""
    return Build(version=version("cormorant"))


def scrape(head: Head) -> bytes:
    """The head's metrics; while the head closes, the last known values. Blocks for a few milliseconds."""
    metrics = head.metrics
    with suppress(CormorantError):  # the fleet is closing or has failed: the last values stay
        if head.is_running and not head.is_closing:
            stats = head.running.fleet.stats(workers=False)
            head.sample(stats)
            metrics.show(describe(head, stats))
        else:
            metrics.show_state("failed" if head.failure else "draining" if head.is_running else "starting")
    return metrics.exposition.text()
