"""`GET /v1/live`: moments as server-sent events, at the reader's pace. All readers are sent the same bytes."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cormorant_api.head import Head
from cormorant_api.live import Live, as_frame
from cormorant_api.tokens import Role
from cormorant_api.transfer import Hangup, SlowReader, send_within
from cormorant_contract.rest.live import Bye, Hello

_HEARTBEAT_S = 5.0
_LOOK_S = 1.0
"""After which a head that closes is noticed, though there are no more moments."""
_STALL_S = 30.0


class LiveStream(Response):
    """The moments of one listener, who has entered already."""

    media_type = "text/event-stream"

    def __init__(self, head: Head, live: Live, *, role: Role) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._head, self._live, self._role = head, live, role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the listener goes, is too slow, or the head closes."""
        head, live = self._head, self._live
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            hello = as_frame("hello", Hello.model_validate({"role": self._role.name.lower()}))
            await send_within(send, scope, hello, timeout_s=_STALL_S)
            async with Hangup(receive, bell=live.bell) as hangup:
                position = -1
                idle_s = 0.0
                while not hangup.happened.is_set() and not head.is_closing:
                    news = live.read(position) if position >= 0 else None
                    if news is None:
                        news = await head.quick(live.opening, await head.stats())
                    data, position = news
                    idle_s = 0.0 if data else idle_s + _LOOK_S
                    if idle_s >= _HEARTBEAT_S:
                        data, idle_s = b": still here\n\n", 0.0
                    if data:
                        await send_within(send, scope, data, timeout_s=_STALL_S)
                    await live.bell.wait_for(
                        lambda at=position: head.is_closing or hangup.happened.is_set() or live.moments > at,  # type: ignore[misc]  # mypy infers no lambda with a default
                        timeout_s=_LOOK_S,
                    )
                if not hangup.happened.is_set():
                    await send_within(send, scope, as_frame("bye", Bye(reason=head.failure)), timeout_s=_STALL_S)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except SlowReader:
            return
        finally:
            live.leave()
