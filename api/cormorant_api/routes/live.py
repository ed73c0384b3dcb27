"""What the page at `/` asks for: moments of the job, and a look at one environment."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.http.tokens import Role
from cormorant_api.live.moments import Moments
from cormorant_api.live.previews import Previews
from cormorant_api.live.stream import LiveStream
from cormorant_api.routes.routing import BINARY, Answers, GuardedRoute, answers, head_of, needs, running_of
from cormorant_contract.base import COUNT_MAX
from cormorant_contract.rest.problems import ProblemType

router = APIRouter(route_class=GuardedRoute, tags=["status"])
PNG = "image/png"

_STREAM: Answers = {
    200: {
        "description": "Server-sent events: hello, opening, then a moment a second, bye.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
_PICTURE: Answers = {200: {"description": "A PNG file, grey or in colours.", "content": {PNG: BINARY}}}


@router.get(
    "/v1/live",
    operation_id="stream_live",
    response_class=Response,
    responses=answers(ProblemType.BUSY, also=_STREAM),
    openapi_extra=needs(Role.READ),
)
async def stream_live(request: Request) -> Response:
    """Status, workers, updates and events, once a second, after the last quarter of an hour. For pages: all listeners
    get the same bytes, and events that come with every batch are left out (`/v1/events` has them).
    """
    running_of(request)
    live: Moments = request.app.state.live
    if not live.enter():
        raise ApiError(429, ProblemType.BUSY, "too many pages watch this job; close some", retry_after_s=10)
    return LiveStream(head_of(request), live, role=request.state.role)


@router.get(
    "/v1/workers/{worker}/picture",
    operation_id="get_picture",
    response_class=Response,
    responses=answers(ProblemType.UNKNOWN_WORKER, ProblemType.NO_PICTURE, ProblemType.BUSY, also=_PICTURE),
    openapi_extra=needs(Role.READ),
)
async def get_picture(
    request: Request,
    worker: str,
    env: Annotated[int, Query(ge=0, le=COUNT_MAX, description="Which environment of the worker.")] = 0,
) -> Response:
    """What one environment shows now, where observations are pictures. Asked of its worker, which does not stop."""
    previews: Previews = request.app.state.previews
    png = await previews.look(worker, env)
    return Response(png, media_type=PNG, headers={"Cache-Control": "no-store"})
