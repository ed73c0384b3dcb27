"""The clock of the event loop that the operator runs on."""

import asyncio
from typing import Any

import pytest

from cormorant_testing.clock import Clock


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The event loop's clock, moved by hand."""
    loop, clock = asyncio.get_running_loop(), Clock()
    monkeypatch.setattr(loop, "time", clock)
    return clock


@pytest.fixture
async def leaping(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Waiting takes no time: the event loop's clock goes on to what is due next."""
    selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]  # of every loop on Unix
    select = selector.select

    def leap(timeout_s: float | None) -> Any:
        clock.now += timeout_s or 0.0
        assert not timeout_s or clock.now < 3600, "an hour of waits: a loop that does not end"
        return select(0)

    monkeypatch.setattr(selector, "select", leap)
    return clock
