"""`GET /v1/live`: moments as server-sent events at the reader's pace. All readers get the same bytes."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cormorant_api.errors import ApiError
from cormorant_api.head import Head
from cormorant_api.http.tokens import Role
from cormorant_api.http.transfer import Hangup, SlowReader, send_within
from cormorant_api.live.moments import Moments, as_frame
from cormorant_contract.rest.live import Bye, Hello
from cormorant_worker.errors import CormorantError

_HEARTBEAT_S = 5.0
_LOOK_S = 1.0
"""Interval for noticing that the head closes when moments stop."""
_STALL_S = 30.0


class LiveStream(Response):
    """Moments for one listener that `Moments.enter` has admitted."""

    media_type = "text/event-stream"

    def __init__(self, head: Head, live: Moments, *, role: Role) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._head, self._live, self._role = head, live, role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the listener disconnects, reads too slowly, or the head closes."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            hello = as_frame("hello", Hello.model_validate({"role": self._role.name.lower()}))
            await send_within(send, scope, hello, timeout_s=_STALL_S)
            async with Hangup(receive, notifier=self._live.notifier) as hangup:
                try:
                    await self._tell(scope, send, hangup)
                    reason = self._head.failure
                except (ApiError, CormorantError) as error:
                    # The status is already sent.
                    reason = self._head.failure if self._head.end_state else str(error)
                if not hangup.happened.is_set():
                    bye = Bye(state=self._head.end_state, reason=reason)
                    await send_within(send, scope, as_frame("bye", bye), timeout_s=_STALL_S)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except SlowReader:
            return
        finally:
            self._live.leave()

    async def _tell(self, scope: Scope, send: Send, hangup: Hangup) -> None:
        head, live = self._head, self._live
        position, idle_s = -1, 0.0

        def is_over() -> bool:
            return head.is_closing or hangup.happened.is_set()

        while not is_over():
            news = live.read(position) if position >= 0 else None
            if news is None:
                news = await head.quick(live.opening, await head.stats())
            data, position = news
            idle_s = 0.0 if data else idle_s + _LOOK_S
            if idle_s >= _HEARTBEAT_S:
                data, idle_s = b": still here\n\n", 0.0
            if data:
                await send_within(send, scope, data, timeout_s=_STALL_S)
            heard = position
            await live.notifier.wait_for(lambda: is_over() or live.moments > heard, timeout_s=_LOOK_S)  # noqa: B023  # ends before the next turn
