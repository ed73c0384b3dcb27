"""Uploads of tensors: headers are checked first, then the body is streamed into a buffer."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash
from fastapi import Request

from cormorant_api.errors import ApiError
from cormorant_contract.rest.base import DIGEST_PREFIX, SAFETENSORS
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.tensor_file import MalformedTensorFile, TensorFile, header_size, looks_like_pickle, parse_header
from cormorant_worker.errors import MalformedWeights

_ACCEPTED = (SAFETENSORS, "application/octet-stream")
_HEAD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    digest: str
    """`xxh3:` and 32 hex digits."""
    finished: float
    """When the last byte arrived, by time.monotonic()."""
    receive_ms: float = 0.0


class UploadRoom:
    """Limits the memory of bodies being received and processed. Thread-safe."""

    def __init__(self, *, most_bytes: int, most: int) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._lock = threading.Lock()
        """Guards the sizes."""
        self._sizes: list[int] = []

    @contextmanager
    def of(self, size_bytes: int) -> Iterator[None]:
        """Reserve memory for one body within the block; 429 if too little is free."""
        with self._lock:
            taken = sum(self._sizes)
            if len(self._sizes) >= self._most or (self._sizes and taken + size_bytes > self._most_bytes):
                raise ApiError(
                    ProblemType.BUSY,
                    f"{len(self._sizes)} uploads with {taken:,} bytes in progress, limit {self._most} uploads with "
                    f"{self._most_bytes:,} bytes; retry",
                    retry_after_s=1,
                )
            self._sizes.append(size_bytes)
        try:
            yield
        finally:
            with self._lock:
                self._sizes.remove(size_bytes)


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
    """Stream a body into a buffer of its size. 400: malformed or truncated; 408: the sender stalled; 415: a pickle."""
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
        if before < _HEAD_BYTES <= at:  # a body that cannot be safetensors is refused early
            head = bytes(buffer[:_HEAD_BYTES])
            try:
                header_size(head, file_size=size)
            except MalformedTensorFile as error:
                raise refusal_of(error, head) from error
    finished = time.monotonic()
    return Received(digest=DIGEST_PREFIX + hasher.hexdigest(), finished=finished, receive_ms=(finished - began) * 1000)


def parse_body(body: bytes | memoryview) -> TensorFile:
    """The header of a complete body; 400 or 415 if it is not safetensors."""
    try:
        return parse_header(body)
    except MalformedTensorFile as error:
        raise refusal_of(error, bytes(body[:8])) from error


def refusal_of(error: MalformedTensorFile | MalformedWeights, head: bytes = b"") -> ApiError:
    """The answer to a body that begins with `head` and is not safetensors: 415 to a pickle, 400 otherwise."""
    if looks_like_pickle(head):
        return ApiError(
            ProblemType.UNSAFE_FORMAT,
            "the body is a pickle (torch.save, an archive), which the head never loads; "
            "send safetensors: cormorant_client's publish(state_dict), or safetensors.torch.save(state_dict)",
            accepted=(SAFETENSORS,),
        )
    return ApiError(ProblemType.MALFORMED_SAFETENSORS, f"the body is not safetensors: {error}", offset=error.offset)
