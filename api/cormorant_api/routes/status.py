"""Status, workers, results of an evaluation; server-sent events (a reader that falls behind is dropped); the live
page's stream and previews; health.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.bodies import STILL_HERE, SlowReader, event_stream
from cormorant_api.http.tokens import Role
from cormorant_api.live.moments import Moments, as_frame
from cormorant_api.live.previews import find_picture, newest_frame, png_of
from cormorant_api.routes.routing import BINARY, EVENT_STREAM, Answers, GuardedRoute, TheHead, guarded
from cormorant_api.status import describe, describe_worker
from cormorant_contract.base import COUNT_MAX
from cormorant_contract.metrics.labels import CONTENT_TYPE
from cormorant_contract.rest.live import Bye, Hello
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.rest.status import Build, EvaluationTable, Readiness, SpacesReport, Status, Workers
from cormorant_contract.spaces import space_to_json
from cormorant_worker.errors import CormorantError
from cormorant_worker.spaces import describe as describe_space

router = APIRouter(route_class=GuardedRoute, tags=["status"])
_FLEET_SILENT_S = 120.0
"""Silence of the fleet's thread that fails liveness. The thread iterates five times per second when idle; saving
gigabytes of state may take seconds.
"""
_LOOK_S = 0.05
health = APIRouter(route_class=GuardedRoute, tags=["health"])
PNG = "image/png"
_EVENTS_HEARTBEAT_S = 15.0
_LIVE_HEARTBEAT_S = 1.0
"""Also the interval of checks for a closing head when no moments arrive."""

_STREAM: Answers = {
    200: {
        "description": "Server-sent events: hello, opening, one moment per second, bye.",
        "content": EVENT_STREAM,
    }
}
_PICTURE: Answers = {200: {"description": "A PNG file, gray or RGB.", "content": {PNG: BINARY}}}


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


@router.get(
    "/v1/events",
    response_class=Response,
    **guarded(Role.READ, ProblemType.BUSY, also={200: {"description": "Server-sent events.", "content": EVENT_STREAM}}),
)
async def stream_events(
    head: TheHead,
    last_event_id: Annotated[str, Header(alias="Last-Event-ID", max_length=64)] = "",
) -> Response:
    """Stream events: updates, pauses, workers, accepted batches. Send `Last-Event-ID` to resume."""
    ring = head.events
    position = ring.position_after(last_event_id) if last_event_id else ring.end
    return event_stream(ring, _events(head, position))


async def _events(head: Head, position: int) -> AsyncGenerator[bytes]:
    ring = head.events
    yield b": cormorant\n\n"
    while True:
        is_last = head.is_closing  # checked before the ring is read: the end is an event
        news = ring.read(position)
        if news is None:
            raise SlowReader("the listener fell behind the ring")
        events, position = news
        yield (
            "".join(
                f"id: {event.id}\nevent: {event.kind}\n"
                f"data: {event.model_dump_json(exclude={'id'}, exclude_defaults=True)}\n\n"
                for event in events
            ).encode()
            or STILL_HERE
        )
        if is_last and not events:
            return
        heard = position
        await ring.notifier.wait_for(
            lambda: head.is_closing or ring.end > heard,  # noqa: B023  # ends before the next turn
            timeout_s=_EVENTS_HEARTBEAT_S,
        )


@router.get("/v1/live", response_class=Response, **guarded(Role.READ, ProblemType.BUSY, also=_STREAM))
async def stream_live(request: Request, head: TheHead) -> Response:
    """Stream status, workers, updates and events once a second, after the history of the run. Meant for web pages: all
    listeners get the same bytes, and per-batch events are left out (`/v1/events` has them).
    """
    _ = head.running  # 503 before the first worker has started
    live: Moments = request.app.state.live
    hello = Hello.model_validate({"role": request.state.role.name.lower()})
    return event_stream(live, _frames(head, live, hello))


@router.get(
    "/v1/workers/{worker}/picture",
    response_class=Response,
    **guarded(Role.READ, ProblemType.UNKNOWN_WORKER, ProblemType.NO_PICTURE, also=_PICTURE),
)
async def get_picture(
    head: TheHead,
    worker: str,
    env: Annotated[int, Query(ge=0, le=COUNT_MAX, description="Index of the environment within the worker.")] = 0,
) -> Response:
    """Current observation of one environment as PNG, if observations are images. The worker keeps stepping."""
    fleet = head.running.fleet
    num_envs, picture = fleet.layout.num_envs, find_picture(fleet.layout.observation)
    if env >= num_envs:
        known = f"workers have {num_envs} environments each, 0 to {num_envs - 1}"
        raise ApiError(ProblemType.INVALID_REQUEST, f"there is no environment {env}; {known}")
    if picture is None:
        space = describe_space(fleet.spaces[0])
        raise ApiError(
            ProblemType.NO_PICTURE, f"observations are not images (uint8 arrays with height and width): {space}"
        )
    png = await head.previews(lambda: png_of(newest_frame(fleet.peek(worker, column=env, leaf=picture))))
    return Response(png, media_type=PNG, headers={"Cache-Control": "no-store"})


async def _frames(head: Head, live: Moments, hello: Hello) -> AsyncGenerator[bytes]:
    yield as_frame("hello", hello)
    position, reason = -1, ""
    try:
        while True:
            is_last = head.is_closing  # checked before the moments are read: the last one has the final numbers
            if (news := live.read(position)) is None:
                news = await head.quick(live.opening, await head.stats())
            frames, position = news
            yield b"".join(frames) or STILL_HERE
            if is_last:
                break
            heard = position
            await live.notifier.wait_for(lambda: head.is_closing or live.end > heard, timeout_s=_LIVE_HEARTBEAT_S)  # noqa: B023  # ends before the next turn
    except (ApiError, CormorantError) as error:
        reason = "" if head.end_state else str(error)  # the status is already sent
    yield as_frame("bye", Bye(state=head.end_state, reason=reason or head.failure))


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
