"""Responses at the pace of their reader: how each of them ends is known."""

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from cormorant_api.http.transfer import LEAVING_KEY, End, PacedResponse, SlowReader, memory_response

Message = MutableMapping[str, Any]
SCOPE = {"type": "http", "method": "GET", "asgi": {"spec_version": "2.3"}}
BUFFERS = [memoryview(bytes([number]) * 3) for number in range(4)]


class Connection:
    """As uvicorn's: sending waits while the reader is slow, and returns at once after a disconnect."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone, self.writable = asyncio.Event(), asyncio.Event()
        self.writable.set()
        self.most = 100
        """The connection begins to close after this many messages, and drops later ones before `receive` tells it."""

    def is_closing(self) -> bool:
        return len(self.sent) >= self.most

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.writable.wait()
        if not self.gone.is_set() and not self.is_closing():
            self.sent.append(message)

    def close(self) -> None:
        self.gone.set()
        self.writable.set()


async def respond(connection: Connection, stall_timeout_s: float = 60.0) -> list[End]:
    ends: list[End] = []
    response = memory_response(
        BUFFERS, media_type="x/y", headers={}, stall_timeout_s=stall_timeout_s, on_end=ends.append
    )
    scope = {**SCOPE, "state": {LEAVING_KEY: connection.is_closing}}
    await response(scope, connection.receive, connection.send)
    return ends


async def _complete() -> list[End]:
    connection = Connection()
    ends = await respond(connection)
    assert b"".join(message.get("body", b"") for message in connection.sent) == b"".join(BUFFERS)
    return ends


async def _gone() -> list[End]:
    connection = Connection()
    connection.writable.clear()
    asyncio.get_running_loop().call_later(0.01, connection.close)
    return await respond(connection)


async def _closing() -> list[End]:
    connection = Connection()
    connection.most = len(BUFFERS)  # all but the last, after the response's start
    return await respond(connection)


async def _slow() -> list[End]:
    connection = Connection()
    connection.writable.clear()
    return await respond(connection, stall_timeout_s=0.01)


@pytest.mark.parametrize(
    ("reader", "end"), [(_complete, "complete"), (_gone, "gone"), (_closing, "gone"), (_slow, "slow")]
)
def test_a_response_says_once_how_it_ended(reader: Any, end: End) -> None:
    assert asyncio.run(reader()) == [end]


def test_a_listener_that_fell_behind_and_reads_nothing_is_let_go() -> None:
    async def body() -> list[End]:
        connection, ends = Connection(), list[End]()

        async def events() -> AsyncGenerator[bytes]:
            yield b"one"
            connection.writable.clear()
            raise SlowReader("the ring is ahead")

        response = PacedResponse(events(), media_type="x/y", headers={}, stall_timeout_s=0.01, on_end=ends.append)
        await asyncio.wait_for(response(SCOPE, connection.receive, connection.send), 10)
        return ends

    assert asyncio.run(body()) == ["slow"]
