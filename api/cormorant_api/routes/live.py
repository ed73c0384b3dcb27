"""Endpoints of the live page: the stream of moments and previews of environments."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.http.tokens import Role
from cormorant_api.live.moments import Moments
from cormorant_api.live.previews import Previews
from cormorant_api.live.stream import LiveStream
from cormorant_api.routes.routing import BINARY, Answers, GuardedRoute, guarded, head_of
from cormorant_contract.base import COUNT_MAX
from cormorant_contract.rest.problems import ProblemType

router = APIRouter(route_class=GuardedRoute, tags=["status"])
PNG = "image/png"

_STREAM: Answers = {
    200: {
        "description": "Server-sent events: hello, opening, one moment per second, bye.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
_PICTURE: Answers = {200: {"description": "A PNG file, grey or RGB.", "content": {PNG: BINARY}}}


@router.get("/v1/live", response_class=Response, **guarded(Role.READ, ProblemType.BUSY, also=_STREAM))
async def stream_live(request: Request) -> Response:
    """Stream status, workers, updates and events once a second, after the history of the run. Meant for web pages: all
    listeners get the same bytes, and per-batch events are left out (`/v1/events` has them).
    """
    head = head_of(request)
    _ = head.running  # 503 before the first worker has started
    live: Moments = request.app.state.live
    if not live.enter():
        raise ApiError(ProblemType.BUSY, "too many pages watch this job; close some of them", retry_after_s=10)
    return LiveStream(head, live, role=request.state.role)


@router.get(
    "/v1/workers/{worker}/picture",
    response_class=Response,
    **guarded(Role.READ, ProblemType.UNKNOWN_WORKER, ProblemType.NO_PICTURE, ProblemType.BUSY, also=_PICTURE),
)
async def get_picture(
    request: Request,
    worker: str,
    env: Annotated[int, Query(ge=0, le=COUNT_MAX, description="Index of the environment within the worker.")] = 0,
) -> Response:
    """Current observation of one environment as PNG, if observations are images. The worker keeps stepping."""
    previews: Previews = request.app.state.previews
    png = await previews.peek(worker, env)
    return Response(png, media_type=PNG, headers={"Cache-Control": "no-store"})
