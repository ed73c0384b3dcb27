"""Bodies in both directions: uploads of tensors, whose headers are checked before they are streamed into a buffer;
responses sent at the reader's pace, as memory in bounded chunks or as server-sent events.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash
from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cormorant_api.errors import ApiError
from cormorant_api.notifier import Ring
from cormorant_contract.rest.base import DIGEST_PREFIX, SAFETENSORS
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.tensor_file import MalformedTensorFile, TensorFile, looks_like_pickle, parse_header

_ACCEPTED = (SAFETENSORS, "application/octet-stream")
_HEAD_BYTES = 8
CHUNK_BYTES = 4 * 1024 * 1024
ABORT_KEY = "cormorant.abort"
"""Key in scope["state"] of a callable that aborts the connection, dropping unsent data. Set by `listener.py`."""
LEAVING_KEY = "cormorant.leaving"
"""Key in scope["state"] of a callable: whether the client has ended the connection, known before any task is told."""
STILL_HERE = b": still here\n\n"
"""A comment in an event stream that keeps the connection alive."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    digest: str
    """`xxh3:` and 32 hex digits."""
    finished: float
    """When the last byte arrived, by time.monotonic()."""
    receive_ms: float = 0.0


class UploadRoom:
    """Limits the memory of bodies being received and processed. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        """Guards `_taken`."""
        self._taken = 0

    @contextmanager
    def of(self, size_bytes: int) -> Iterator[None]:
        """Reserve memory for one body within the block; 429 if too little is free."""
        with self._lock:
            if self._taken and self._taken + size_bytes > self._most_bytes:
                raise ApiError(
                    ProblemType.BUSY,
                    f"uploads with {self._taken:,} bytes in progress, limit {self._most_bytes:,}; retry",
                    retry_after_s=1,
                )
            self._taken += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self._taken -= size_bytes


def size_of_body(request: Request, *, limit_bytes: int) -> int:
    """The size of a body, from its headers; 400, 411, 413 or 415."""
    headers = request.headers
    media = headers.get("content-type", SAFETENSORS).partition(";")[0].strip().lower()
    if media not in _ACCEPTED:
        raise ApiError(
            ProblemType.UNSUPPORTED_FORMAT, f"Content-Type is {media[:80]}; send {SAFETENSORS}", accepted=_ACCEPTED
        )
    length = headers.get("content-length")
    if length is None or "transfer-encoding" in headers:
        raise ApiError(ProblemType.LENGTH_REQUIRED, "Content-Length is missing; send it, chunked bodies are refused")
    size = int(length)  # uvicorn refuses other text
    if size > limit_bytes:
        raise ApiError(
            ProblemType.TOO_LARGE,
            f"the body has {size:,} bytes, the limit is {limit_bytes:,}; check that the weights are for this policy",
            limit_bytes=limit_bytes,
        )
    if size <= _HEAD_BYTES:
        raise refusal_of(MalformedTensorFile(f"the body has {size} bytes; a safetensors file has at least 10"))
    return size


async def receive(request: Request, buffer: memoryview, *, stall_timeout_s: float) -> Received:
    """Stream a body into a buffer of its size. 400: truncated; 408: the sender stalled."""
    began, size, at = time.monotonic(), len(buffer), 0
    hasher = xxhash.xxh3_128()
    while at < size:
        try:
            async with asyncio.timeout(stall_timeout_s):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(
                ProblemType.UPLOAD_STALLED,
                f"no data for {stall_timeout_s:.0f} s after {at:,} of {size:,} bytes; upload discarded",
            ) from None
        chunk: bytes = message.get("body", b"")
        before, at = at, at + len(chunk)
        if at < size and (message["type"] == "http.disconnect" or not message.get("more_body", False)):
            raise ApiError(
                ProblemType.MALFORMED_REQUEST, f"the body ended after {at:,} of {size:,} bytes; upload discarded"
            )
        buffer[before:at] = chunk
        hasher.update(chunk)
    finished = time.monotonic()
    return Received(digest=DIGEST_PREFIX + hasher.hexdigest(), finished=finished, receive_ms=(finished - began) * 1000)


def parse_body(body: bytes | memoryview) -> TensorFile:
    """The header of a complete body; 400 or 415 if it is not safetensors."""
    try:
        return parse_header(body)
    except MalformedTensorFile as error:
        raise refusal_of(error, bytes(body[:8])) from error


def refusal_of(error: MalformedTensorFile, head: bytes = b"") -> ApiError:
    """The answer to a body that begins with `head` and is not safetensors: 415 to a pickle, 400 otherwise."""
    if looks_like_pickle(head):
        return ApiError(
            ProblemType.UNSAFE_FORMAT,
            "the body is a pickle (torch.save, an archive), which the head never loads; "
            "send safetensors: cormorant_client's publish(state_dict), or safetensors.torch.save(state_dict)",
            accepted=(SAFETENSORS,),
        )
    return ApiError(ProblemType.MALFORMED_SAFETENSORS, f"the body is not safetensors: {error}", offset=error.offset)


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
        on_end: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`chunks` may raise SlowReader; cancelled when the client disconnects. `on_end`: called once on the event loop
        when no memory of the chunks is read any more, with whether everything was sent.
        """
        super().__init__(chunks, headers=headers, media_type=media_type)
        self._stall_timeout_s, self._on_end = stall_timeout_s, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = False
        left = int(self.headers.get("content-length", -1))
        is_leaving = scope.get("state", {}).get(LEAVING_KEY, lambda: False)

        async def send_paced(message: Message) -> None:
            # Returns when everything before the message has left this process; the last message is empty.
            nonlocal is_complete, left
            is_dropped = is_leaving()
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await send(message)
            except TimeoutError:
                scope.get("state", {}).get(ABORT_KEY, lambda: None)()
                raise SlowReader(f"the client took longer than {self._stall_timeout_s:.0f} s for one chunk") from None
            left -= len(message.get("body", b""))
            if not is_dropped and (left == 0 or not message.get("more_body", True)):
                is_complete = True  # even if the client, which has the whole body, disconnects now
            # uvicorn returns at once after a disconnect: Starlette cancels this task before it goes on.
            await asyncio.sleep(0)

        try:
            await super().__call__(scope, receive, send_paced)
        except SlowReader:
            if "content-length" not in self.headers:
                with suppress(SlowReader):  # a listener that fell behind may not be reading
                    await send_paced({"type": "http.response.body", "body": b"", "more_body": False})
            is_complete = False
        finally:
            self._on_end(is_complete)


def memory_response(
    buffers: Sequence[memoryview],
    *,
    media_type: str,
    headers: Mapping[str, str],
    stall_timeout_s: float,
    on_end: Callable[[bool], None] = lambda _: None,
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


def event_stream(ring: Ring[Any], events: AsyncGenerator[bytes]) -> PacedResponse:
    """Server-sent events, encoded, for one listener of a ring; 429 if the ring has too many."""
    ring.enter()
    return PacedResponse(
        events,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        stall_timeout_s=30.0,
        on_end=lambda _: ring.leave(),
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
