"""What goes on: status, workers, events, health."""

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.http.tokens import Role
from cormorant_api.routes.event_stream import EventStream
from cormorant_api.routes.routing import GuardedRoute, answers, head_of, needs
from cormorant_api.routes.scrape import scrape
from cormorant_api.status import describe, describe_worker
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.status import Build, Check, Readiness, Status, Worker, Workers

router = APIRouter(route_class=GuardedRoute, tags=["status"])
_FLEET_SILENT_S = 120.0
"""It turns five times a second when nothing happens; a state of gigabytes may keep it busy for seconds."""
health = APIRouter(route_class=GuardedRoute, tags=["health"])


@router.get("/v1/status", operation_id="get_status", responses=answers(), openapi_extra=needs(Role.READ))
async def get_status(request: Request) -> Status:
    """The whole job at this moment."""
    head = head_of(request)
    return describe(head, head.running, await head.stats(workers=False))


@router.get("/v1/workers", operation_id="list_workers", responses=answers(), openapi_extra=needs(Role.READ))
async def list_workers(request: Request) -> Workers:
    """Every worker."""
    head = head_of(request)
    stats = await head.stats()
    return Workers(workers=tuple(describe_worker(head, w, published=stats.version) for w in stats.workers))


@router.get(
    "/v1/workers/{worker}",
    operation_id="get_worker",
    responses=answers(ProblemType.UNKNOWN_WORKER),
    openapi_extra=needs(Role.READ),
)
async def get_worker(request: Request, worker: str) -> Worker:
    """One worker."""
    head = head_of(request)
    stats = await head.stats()
    for found in stats.workers:
        if found.name == worker:
            return describe_worker(head, found, published=stats.version)
    known = tuple(found.name for found in stats.workers)
    raise ApiError(404, ProblemType.UNKNOWN_WORKER, f"there is no worker {worker[:80]!r}", known=known)


@router.get(
    "/v1/events",
    operation_id="stream_events",
    response_class=Response,
    responses=answers(
        ProblemType.BUSY,
        also={
            200: {
                "description": "Server-sent events.",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            }
        },
    ),
    openapi_extra=needs(Role.READ),
)
async def stream_events(
    request: Request,
    last_event_id: Annotated[str, Header(alias="Last-Event-ID", max_length=64)] = "",
    limit: Annotated[int, Query(ge=0, description="End after so many events; 0: never.")] = 0,
) -> Response:
    """What happens, as it happens: updates, pauses, workers, batches that are accepted. `Last-Event-ID` resumes."""
    events = head_of(request).events
    if not events.enter():
        raise ApiError(429, ProblemType.BUSY, "too many streams of events are open", retry_after_s=5)
    return EventStream(head_of(request), after=last_event_id, limit=limit)


@health.get(
    "/livez",
    operation_id="livez",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, 503: {"description": "The fleet's thread hangs."}},
)
async def livez(request: Request) -> Response:
    """The event loop runs, and so does the fleet's thread. Nothing is asked of either."""
    silent_s = head_of(request).silent_s
    if silent_s > _FLEET_SILENT_S:
        return Response(
            f"the fleet's thread has not turned for {silent_s:.0f} s (limit {_FLEET_SILENT_S:.0f} s)\n",
            status_code=503,
            media_type="text/plain",
        )
    return Response("ok\n", media_type="text/plain")


@health.get("/healthz", include_in_schema=False)
async def healthz(request: Request) -> Response:
    """The same, under the name that people try first."""
    return await livez(request)


@health.get(
    "/startupz",
    operation_id="startupz",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, 503: {"description": "No worker has started yet."}},
)
async def startupz(request: Request) -> Response:
    """The first worker has started: from here on `/livez` and `/readyz` say what there is to say."""
    if head_of(request).is_running:
        return Response("ok\n", media_type="text/plain")
    return Response("the first worker has not started yet\n", status_code=503, media_type="text/plain")


@health.get(
    "/readyz",
    operation_id="readyz",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Not ready; `?verbose` says why."}},
)
async def readyz(request: Request, verbose: str | None = None) -> Response:
    """Whether requests should be sent here. `?verbose` lists the checks."""
    checks = _checks(request)
    ready = all(check.ok for check in checks)
    body = Readiness(ready=ready, checks=tuple(checks) if verbose is not None else ())
    return JSONResponse(body.model_dump(mode="json"), status_code=200 if ready else 503)


@health.get(
    "/metrics",
    operation_id="get_metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}},
)
async def get_metrics(request: Request) -> Response:
    """Metrics of the whole job, for Prometheus. Open, as probes are: they tell of speed, not of data."""
    accept = request.headers.get("accept", "")
    # In a thread of its own: neither what is long nor what is closing makes a scrape wait.
    body, media_type = await asyncio.to_thread(scrape, head_of(request), accept)
    return Response(body, headers={"Content-Type": media_type})


@health.get("/version", operation_id="get_version")
async def get_version() -> Build:
    """What runs."""
    try:
        return Build(version=version("cormorant"))
    except PackageNotFoundError:
        return Build(version="unknown")


def _checks(request: Request) -> list[Check]:
    head = head_of(request)
    return [
        Check(name="workers", ok=head.is_running, detail="" if head.is_running else "the first one has not started"),
        # A head that drains is where learners take the last batches: a Service that left it out would lose them.
        Check(name="not-closing", ok=not head.is_closing),
        Check(name="fleet", ok=not head.failure, detail=head.failure),
    ]
