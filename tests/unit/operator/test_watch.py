"""A loop that ends, whatever the tasks in it do."""

import asyncio
import threading
from typing import Any

import pytest

from cormorant_operator.kube.watch import KINDS, Watch, run_bounded, settings


def test_a_task_that_will_not_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    cancelled = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)

    async def main() -> None:
        asyncio.get_running_loop().stubborn = asyncio.create_task(stubborn())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        raise ValueError("why it ended")

    with pytest.raises(ValueError, match="why it ended"):
        run_bounded(main(), end_s=0.1)
    assert cancelled == [True]


def test_kopf_lets_go_of_listed_objects_at_once() -> None:
    chosen = settings(KINDS)
    # With kopf's own 5 s and 500, 7,000 objects of 1,000 jobs took twice the memory. At 0 kopf may miss an event.
    assert 0 < chosen.queueing.idle_timeout <= 0.1
    assert chosen.watching.chunk_size is not None
    assert chosen.watching.chunk_size <= 100


def test_kopf_without_one_of_its_streams_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = threading.Semaphore(0)

    async def goes_on(*, stop_flag: asyncio.Event, **_: Any) -> None:
        """As kopf while other streams wait to log in again, which may last for ever."""
        ended = asyncio.create_task(asyncio.sleep(0), name="watcher for pods")
        await stop_flag.wait()
        assert ended.done()

    monkeypatch.setattr("kopf.operator", goes_on)
    watch = Watch(lambda *_, **__: None, on_gap=gaps.release)
    watch.start()
    try:
        assert gaps.acquire(timeout=60)
    finally:
        watch.stop()
