"""Bulk bytes on their way out: pieces of memory in bounded chunks, at the pace of the reader."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cormorant_api.notifier import AsyncNotifier

CHUNK_BYTES = 4 * 1024 * 1024
ABORT_KEY = "cormorant.abort"
"""Key in scope["state"] of a callable that aborts the connection, dropping unsent data. Set by `protocol.py`."""


class SlowReader(Exception):
    """The client took too long to read one chunk; the connection was aborted."""


def chunks_of(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes of consecutive buffers, in chunks, without a copy."""
    for buffer in buffers:
        flat = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]


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
            on_end: called once on the event loop when the memory is no longer read; True if everything was sent.
        """
        super().__init__(None, headers=dict(headers), media_type=media_type)
        self._buffers, self._on_end, self._stall_timeout_s = buffers, on_end, stall_timeout_s
        self.headers["Content-Length"] = str(sum(buffer.nbytes for buffer in buffers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with Hangup(receive) as hangup:
                if scope["method"] != "HEAD":
                    for chunk in chunks_of(self._buffers):
                        if hangup.happened.is_set():
                            return
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
