"""Conditional requests, and events that listeners missed."""

import pytest

from cormorant_api.control.event_ring import EventRing
from cormorant_api.errors import ApiError
from cormorant_api.routes.weights import preferred_wait_s
from cormorant_api.weights.publisher import check_preconditions

ETAG = '"7:xxh3:ab"'


@pytest.mark.parametrize(
    ("headers", "etag", "holds"),
    [
        ({"if-match": ETAG}, ETAG, True),
        ({"if-match": f'"x", {ETAG}'}, ETAG, True),
        ({"if-match": "*"}, ETAG, True),
        ({"if-match": "*"}, "", False),
        ({"if-match": ETAG}, "", False),
        ({"if-match": f"W/{ETAG}"}, ETAG, False),
    ],
)
def test_preconditions(headers: dict[str, str], etag: str, holds: bool) -> None:
    if holds:
        check_preconditions(headers, etag)
        return
    with pytest.raises(ApiError) as refused:
        check_preconditions(headers, etag)
    assert refused.value.status == 412
    assert refused.value.members.get("current_etag", "") == etag


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


def test_listeners_are_bounded_and_the_slow_ones_counted() -> None:
    ring = EventRing(epoch="e")
    assert all(ring.enter() for _ in range(64))
    assert not ring.enter()
    ring.leave(was_slow=True)
    assert (ring.listeners, ring.dropped_listeners) == (63, 1)
