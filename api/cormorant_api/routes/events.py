"""`GET /v1/events`: server-sent events; a reader that falls behind the ring is dropped."""

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.tokens import Role
from cormorant_api.http.transfer import STILL_HERE, EventStream, Hangup, SlowReader
from cormorant_api.routes.routing import EVENT_STREAM, GuardedRoute, guarded, head_of
from cormorant_contract.rest.events import Event
from cormorant_contract.rest.problems import ProblemType

_HEARTBEAT_S = 15.0
router = APIRouter(route_class=GuardedRoute, tags=["status"])


@router.get(
    "/v1/events",
    response_class=Response,
    **guarded(Role.READ, ProblemType.BUSY, also={200: {"description": "Server-sent events.", "content": EVENT_STREAM}}),
)
async def stream_events(
    request: Request,
    last_event_id: Annotated[str, Header(alias="Last-Event-ID", max_length=64)] = "",
    limit: Annotated[int, Query(ge=0, description="End after this many events; 0: no limit.")] = 0,
) -> Response:
    """Stream events: updates, pauses, workers, accepted batches. Send `Last-Event-ID` to resume."""
    head = head_of(request)
    ring = head.events
    if not ring.enter():
        raise ApiError(ProblemType.BUSY, "too many event streams are open; close some of them", retry_after_s=5)
    position = ring.position_after(last_event_id) if last_event_id else ring.end
    return EventStream(
        lambda hangup: _events(head, position, limit, hangup),
        notifier=ring.notifier,
        on_end=lambda was_slow: ring.leave(was_slow=was_slow),
    )


async def _events(head: Head, position: int, limit: int, hangup: Hangup) -> AsyncGenerator[bytes]:
    ring, sent = head.events, 0
    yield b": cormorant\n\n"
    while not hangup.happened.is_set():
        is_last = head.is_closing  # asked before the ring is read: the end is an event
        news = ring.read(position)
        if news is None:
            raise SlowReader("the listener fell behind the ring")
        events, position = news
        if limit:
            events = events[: limit - sent]
        sent += len(events)
        yield "".join(map(_as_text, events)).encode() or STILL_HERE
        if (is_last and not events) or (limit and sent >= limit):
            return
        heard = position
        await ring.notifier.wait_for(
            lambda: head.is_closing or hangup.happened.is_set() or ring.end > heard,  # noqa: B023  # ends before the next turn
            timeout_s=_HEARTBEAT_S,
        )


def _as_text(event: Event) -> str:
    return (
        f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json(exclude={'id'}, exclude_defaults=True)}\n\n"
    )
