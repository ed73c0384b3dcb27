"""Responses at the pace of their reader: how each of them ends is known. Conditional requests, and missed events."""

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from cormorant_api.errors import ApiError
from cormorant_api.http.bodies import LEAVING_KEY, PacedResponse, SlowReader, memory_response
from cormorant_api.notifier import EventRing
from cormorant_api.routes.weights import preferred_wait_s
from cormorant_api.weights.publisher import matches

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


@pytest.mark.parametrize("what", ["reads", "goes", "is closing", "stalls", "falls behind"])
def test_a_response_says_once_whether_all_was_sent(what: str) -> None:
    async def body() -> list[bool]:
        connection, ends = Connection(), list[bool]()

        async def events() -> AsyncGenerator[bytes]:
            yield b"one"
            connection.writable.clear()
            raise SlowReader("the ring is ahead")

        if what in ("goes", "stalls"):
            connection.writable.clear()
        if what == "goes":
            asyncio.get_running_loop().call_later(0.01, connection.close)
        if what == "is closing":
            connection.most = len(BUFFERS)  # all but the last, after the response's start
        limit_s = 0.01 if what in ("stalls", "falls behind") else 60.0
        options: dict[str, Any] = {"headers": {}, "stall_timeout_s": limit_s, "on_end": ends.append}
        response = memory_response(BUFFERS, media_type="x/y", **options)
        if what == "falls behind":  # a listener to events that reads nothing any more
            response = PacedResponse(events(), media_type="x/y", **options)
        scope = {**SCOPE, "state": {LEAVING_KEY: connection.is_closing}}
        await response(scope, connection.receive, connection.send)
        sent = b"".join(message.get("body", b"") for message in connection.sent)
        assert (sent == b"".join(BUFFERS)) == (what == "reads")
        return ends

    assert asyncio.run(body()) == [what == "reads"]


ETAG = '"7:xxh3:ab"'


@pytest.mark.parametrize(
    ("header", "etag", "holds"),
    [
        (ETAG, ETAG, True),
        (f'"x", {ETAG}', ETAG, True),
        ("*", ETAG, True),
        ("*", "", False),
        (ETAG, "", False),
        (f"W/{ETAG}", ETAG, False),
    ],
)
def test_preconditions(header: str, etag: str, holds: bool) -> None:
    assert matches(header, etag) == holds


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [("wait=5", 5), ("respond-async, wait=2.5", 2.5), ("wait=9999", 300), ("wait=-1", 0), ("wait", 0), ("wait=nan", 0)],
)
def test_preferred_waits(prefer: str, seconds: float) -> None:
    assert preferred_wait_s({"prefer": prefer}, 300) == seconds


def test_a_listener_goes_on_after_the_last_event_it_saw() -> None:
    ring = EventRing(epoch="e", capacity=3)
    for frames in range(5):
        ring.add("accepted", frames=frames)
    assert [event.frames for event in ring.read(ring.position_after("e-2"))[0]] == [3, 4]
    assert ring.read(ring.position_after("e-4")) == ([], 5)
    assert [event.frames for event in ring.read(ring.position_after("other-9"))[0]] == [2, 3, 4]
    assert [event.frames for event in ring.read(ring.position_after("nonsense"))[0]] == [2, 3, 4]
    assert ring.position_after("e-999999") == 5
    assert ring.read(1) is None, "a listener that fell behind is told"


def test_listeners_are_bounded() -> None:
    ring = EventRing(epoch="e")
    for _ in range(64):
        ring.enter()
    with pytest.raises(ApiError, match="64 streams like this one are open, the limit; close some of them"):
        ring.enter()
    ring.leave()
    ring.enter()
