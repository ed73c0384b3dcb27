"""Bytes on their way out at the pace of the reader: pieces of memory in bounded chunks, and server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cormorant_api.notifier import AsyncNotifier

CHUNK_BYTES = 4 * 1024 * 1024
ABORT_KEY = "cormorant.abort"
"""Key in scope["state"] of a callable that aborts the connection, dropping unsent data. Set by `protocol.py`."""
STILL_HERE = b": still here\n\n"
"""A comment in a stream of events: no event, and the connection lives."""
_EVENT_STALL_S = 30.0


class SlowReader(Exception):
    """The client took too long to read one chunk, so that the connection was aborted, or fell behind."""


async def send_within(send: Send, scope: Scope, body: bytes | memoryview, *, timeout_s: float) -> None:
    """Send one chunk of a body. Returns when everything before it has left this process.

    Raises:
        SlowReader: the client took longer than `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})
    except TimeoutError:
        scope.get("state", {}).get(ABORT_KEY, lambda: None)()
        raise SlowReader(f"the client took longer than {timeout_s:.0f} s to read one chunk") from None


class Hangup:
    """Notices that the client has disconnected. Async context manager around waiting and sending."""

    def __init__(self, receive: Receive, *, notifier: AsyncNotifier | None = None) -> None:
        """`notifier` is notified of a hang-up."""
        self.happened = asyncio.Event()
        self._notifier = notifier
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Hangup":
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # discard the rest of the body
        self.happened.set()
        if self._notifier is not None:
            self._notifier.notify()


class BufferResponse(Response):
    """Memory as a response body of known length."""

    def __init__(
        self,
        buffers: Sequence[memoryview],
        *,
        media_type: str,
        headers: Mapping[str, str],
        stall_timeout_s: float = 60.0,
        on_end: Callable[[bool], None] | None = None,
    ) -> None:
        """Describe the answer.

        Args:
            buffers: views of bytes.
            on_end: called once on the event loop when the memory is no longer read; True if everything was sent.
        """
        super().__init__(None, headers=dict(headers), media_type=media_type)
        self._buffers, self._on_end, self._stall_timeout_s = buffers, on_end, stall_timeout_s
        self.headers["Content-Length"] = str(sum(map(len, buffers)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with Hangup(receive) as hangup:
                if scope["method"] != "HEAD":
                    for buffer in self._buffers:
                        for start in range(0, len(buffer), CHUNK_BYTES):
                            if hangup.happened.is_set():
                                return
                            chunk = buffer[start : start + CHUNK_BYTES]
                            await send_within(send, scope, chunk, timeout_s=self._stall_timeout_s)
                    # Wait until the last chunk has left this process: after `on_end` its memory is overwritten.
                    await send_within(send, scope, b"", timeout_s=self._stall_timeout_s)
                is_whole = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except SlowReader:
            return
        finally:
            if self._on_end is not None:
                self._on_end(is_whole)


class EventStream(Response):
    """Server-sent events for one listener, until they end or it disconnects or reads too slowly."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[Hangup], AsyncGenerator[bytes]],
        *,
        notifier: AsyncNotifier,
        on_end: Callable[[bool], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the answer.

        Args:
            events: encoded events; ends soon after a hang-up.
            notifier: notified of a hang-up.
            on_end: called once at the end; True if the listener read too slowly.
        """
        super().__init__(None, headers={"Cache-Control": "no-store", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._notifier, self._on_end = events, notifier, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        was_slow = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with Hangup(receive, notifier=self._notifier) as hangup, aclosing(self._events(hangup)) as events:
                async for data in events:
                    await send_within(send, scope, data, timeout_s=_EVENT_STALL_S)
        except SlowReader:
            was_slow = True
        finally:
            self._on_end(was_slow)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
