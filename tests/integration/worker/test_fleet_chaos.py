"""Everything at once: kills, publishes, pauses, states and resizes while a consumer takes. Every value stays exact."""

import os
import random
import signal
import threading

import pytest

from cormorant_testing.collecting import scene
from cormorant_testing.policies import numbered
from cormorant_worker.errors import FleetError, StateError
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.local_fleet import LocalFleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Mischief(threading.Thread):
    """Does something at random moments until the fleet is done."""

    def __init__(self, fleet: WorkerFleet, seed: int) -> None:
        super().__init__()
        self._fleet, self._chance = fleet, random.Random(seed)
        self.over = threading.Event()
        self.kills = 0
        self.failed: list[BaseException] = []
        self.done: list[str] = []

    def run(self) -> None:
        version = 0
        while not self.over.wait(self._chance.uniform(0.05, 0.6)):
            what = self._chance.choice(["kill", "publish", "publish", "pause", "state", "resize"])
            try:
                match what:
                    case "kill" if self.kills < 3:
                        workers = [worker for worker in self._fleet.stats().workers if worker.pid]  # 0: this group
                        if workers:
                            os.kill(self._chance.choice(workers).pid, signal.SIGKILL)
                            self.kills += 1
                    case "publish":
                        version += 1
                        self._fleet.publish(numbered(version), version=version)
                    case "pause":
                        self._fleet.pause()
                        before = self._fleet.stats().stepped_frames
                        self.over.wait(0.1)
                        assert self._fleet.stats().stepped_frames == before
                        self._fleet.resume()
                    case "state":
                        assert self._fleet.state()
                    case "resize" if self._chance.random() < 0.4:
                        self._fleet.resize(self._chance.randint(1, 3))
                self.done.append(what)
            except StateError as error:
                if "call again" not in str(error):  # a worker was killed while its state was asked for
                    self.failed.append(error)
            except Exception as error:  # noqa: BLE001  # the thread's edge: the test looks at it
                self.failed.append(error)
                return


@pytest.mark.parametrize(
    ("mode", "bound", "drops", "seed"),
    [
        ("async", None, False, 1),
        ("sync", None, False, 2),
        ("async", 1, False, 3),
        ("async", None, True, 4),
        ("sync", 0, False, 5),
    ],
)
def test_nothing_is_lost_repeated_or_stuck(mode: str, bound: int | None, drops: bool, seed: int) -> None:
    collection = {"mode": mode, "totalFrames": 6007} | (
        {"weights": {"maxStaleness": bound}} if bound is not None else {}
    )
    queue = {"capacityBatches": 3, "onFull": "drop_oldest" if drops else "wait"}
    job, checker = scene(
        "versioned",
        ends="alternate",
        step_s=0.004,
        collection=collection,
        queue=queue,
        run_policy={"maxRestartsPerSlot": 50},
        gaps=drops or bound is not None,
    )
    with WorkerFleet(job, FleetOptions(workers=2, control_timeout_s=40.0)) as fleet:
        mischief = Mischief(fleet, seed)
        mischief.start()
        for batch in LocalFleet(fleet).batches():
            checker.take(batch)
        mischief.over.set()
        mischief.join(timeout=60)
        assert not mischief.is_alive()
        # What fails because the fleet finished meanwhile is no failure.
        assert [error for error in mischief.failed if not isinstance(error, FleetError)] == []
        stats = fleet.stats()
        assert stats.frames == 6007
        assert checker.frames == 6007 - stats.dropped.get("drop_oldest", 0)
        assert stats.stepped_frames == stats.frames + sum(stats.dropped.values()) - stats.dropped.get("drop_oldest", 0)
        assert mischief.done
        slots = fleet._core.queue.blocks
        assert len(slots._free) == len(slots._blocks)
