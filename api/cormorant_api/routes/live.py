"""Server-sent events (a reader that falls behind is dropped), the live page's stream, and its previews."""

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.bodies import STILL_HERE, SlowReader, event_stream
from cormorant_api.http.tokens import Role
from cormorant_api.live.moments import Moments, as_frame
from cormorant_api.live.previews import find_picture, newest_frame, png_of
from cormorant_api.routes.routing import BINARY, EVENT_STREAM, Answers, GuardedRoute, TheHead, guarded
from cormorant_contract.base import COUNT_MAX
from cormorant_contract.rest.live import Bye, Hello
from cormorant_contract.rest.problems import ProblemType
from cormorant_worker.errors import CormorantError
from cormorant_worker.spaces import describe

router = APIRouter(route_class=GuardedRoute, tags=["status"])
PNG = "image/png"
_EVENTS_HEARTBEAT_S = 15.0
_LOOK_S = 1.0
"""Interval of checks for a closing head when no moments arrive."""

_STREAM: Answers = {
    200: {
        "description": "Server-sent events: hello, opening, one moment per second, bye.",
        "content": EVENT_STREAM,
    }
}
_PICTURE: Answers = {200: {"description": "A PNG file, gray or RGB.", "content": {PNG: BINARY}}}


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
        space = describe(fleet.spaces[0])
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
            await live.notifier.wait_for(lambda: head.is_closing or live.end > heard, timeout_s=_LOOK_S)  # noqa: B023  # ends before the next turn
    except (ApiError, CormorantError) as error:
        reason = "" if head.end_state else str(error)  # the status is already sent
    yield as_frame("bye", Bye(state=head.end_state, reason=reason or head.failure))
