"""`GET /v1/events`: server-sent events at the reader's pace; a reader that falls behind the ring is dropped."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cormorant_api.head import Head
from cormorant_api.http.transfer import Hangup, SlowReader, send_within
from cormorant_contract.rest.events import Event

_HEARTBEAT_S = 15.0
_STALL_S = 30.0


class EventStream(Response):
    """Events for one listener that `EventRing.enter` has admitted."""

    media_type = "text/event-stream"

    def __init__(self, head: Head, *, after: str, limit: int = 0) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._head, self._limit = head, limit
        self._position = head.events.position_after(after) if after else head.events.end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the listener disconnects, reads too slowly, or the head closes."""
        ring = self._head.events
        was_slow = False
        sent = 0
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send_within(send, scope, b": cormorant\n\n", timeout_s=_STALL_S)
            async with Hangup(receive, notifier=ring.notifier) as hangup:
                while not hangup.happened.is_set():
                    is_last = self._head.is_closing  # asked before the ring is read: the end is an event
                    news = ring.read(self._position)
                    if news is None:
                        was_slow = True
                        break
                    events, self._position = news
                    if self._limit:
                        events = events[: self._limit - sent]
                    sent += len(events)
                    text = "".join(map(_as_text, events)) or ": still here\n\n"
                    await send_within(send, scope, text.encode(), timeout_s=_STALL_S)
                    if (is_last and not events) or (self._limit and sent >= self._limit):
                        break
                    await ring.notifier.wait_for(
                        lambda: self._head.is_closing or hangup.happened.is_set() or ring.end > self._position,
                        timeout_s=_HEARTBEAT_S,
                    )
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except SlowReader:
            was_slow = True
        finally:
            ring.leave(was_slow=was_slow)


def _as_text(event: Event) -> str:
    return (
        f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json(exclude={'id'}, exclude_defaults=True)}\n\n"
    )
