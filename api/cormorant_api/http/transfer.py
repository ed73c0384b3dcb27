"""Responses sent at the reader's pace: memory in bounded chunks, and server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

CHUNK_BYTES = 4 * 1024 * 1024
ABORT_KEY = "cormorant.abort"
"""Key in scope["state"] of a callable that aborts the connection, dropping unsent data. Set by `protocol.py`."""
LEAVING_KEY = "cormorant.leaving"
"""Key in scope["state"] of a callable: whether the client has ended the connection, known before any task is told."""
STILL_HERE = b": still here\n\n"
"""A comment in an event stream that keeps the connection alive."""
End = Literal["complete", "slow", "gone"]
"""How a response ended: everything was sent; the client read too slowly; it disconnected, or the head is closing."""
T = TypeVar("T")


class SlowReader(Exception):
    """The client took too long to read one chunk, so that the connection was aborted, or fell behind."""


class PacedResponse(StreamingResponse):
    """Sends the chunks of a body until the last one, or until the client disconnects or takes too long to read one."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes] | AsyncGenerator[memoryview],
        *,
        media_type: str,
        headers: Mapping[str, str],
        stall_timeout_s: float,
        on_end: Callable[[End], None] = lambda _: None,
    ) -> None:
        """`chunks` may raise SlowReader; cancelled when the client disconnects. `on_end`: called once on the event loop
        when no memory of the chunks is read any more.
        """
        super().__init__(chunks, headers=headers, media_type=media_type)
        self._stall_timeout_s, self._on_end = stall_timeout_s, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end: End = "gone"
        left = int(self.headers.get("content-length", -1))
        is_leaving = scope.get("state", {}).get(LEAVING_KEY, lambda: False)

        async def send_paced(message: Message) -> None:
            # Returns when everything before the message has left this process; the last message is empty.
            nonlocal end, left
            is_dropped = is_leaving()
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await send(message)
            except TimeoutError:
                scope.get("state", {}).get(ABORT_KEY, lambda: None)()
                raise SlowReader(f"the client took longer than {self._stall_timeout_s:.0f} s for one chunk") from None
            left -= len(message.get("body", b""))
            if not is_dropped and (left == 0 or not message.get("more_body", True)):
                end = "complete"  # even if the client, which has the whole body, disconnects now
            # uvicorn returns at once after a disconnect: Starlette cancels this task before it goes on.
            await asyncio.sleep(0)

        try:
            await super().__call__(scope, receive, send_paced)
        except SlowReader:
            if "content-length" not in self.headers:
                with suppress(SlowReader):  # a listener that fell behind may not be reading
                    await send_paced({"type": "http.response.body", "body": b"", "more_body": False})
            end = "slow"
        finally:
            self._on_end(end)


def memory_response(
    buffers: Sequence[memoryview],
    *,
    media_type: str,
    headers: Mapping[str, str],
    stall_timeout_s: float = 60.0,
    on_end: Callable[[End], None] = lambda _: None,
) -> PacedResponse:
    """Views of bytes as a response body of known length."""

    async def chunks() -> AsyncGenerator[memoryview]:
        for buffer in buffers:
            for start in range(0, len(buffer), CHUNK_BYTES):
                yield buffer[start : start + CHUNK_BYTES]

    return PacedResponse(
        chunks(),
        media_type=media_type,
        headers={**headers, "Content-Length": str(sum(map(len, buffers)))},
        stall_timeout_s=stall_timeout_s,
        on_end=on_end,
    )


def event_stream(
    events: AsyncGenerator[bytes], *, on_end: Callable[[End], None], headers: Mapping[str, str] | None = None
) -> PacedResponse:
    """Server-sent events, encoded, for one listener."""
    return PacedResponse(
        events,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", **(headers or {})},
        stall_timeout_s=30.0,
        on_end=on_end,
    )


async def while_connected(receive: Receive, call: Coroutine[Any, Any, T]) -> T | None:
    """The result of a call; None if the client disconnected first, which cancels the call."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # discard the rest of the body

    asked, gone = asyncio.ensure_future(call), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
        return await asked if asked.done() else None
    finally:
        asked.cancel()
        gone.cancel()
