"""Workers that make no progress are found, whatever they were doing."""

from typing import Any

import numpy as np
import pytest

from cormorant_testing.collecting import make_job
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.timing import Timing, spent_ns
from cormorant_worker.fleet.counters import FleetCounters
from cormorant_worker.fleet.hang_detector import HangDetector
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.slot import Slot, SlotState, WorkerHandle
from cormorant_worker.heartbeat_layout import NUM_TIMING
from cormorant_worker.worker.heartbeat import Phase

LIMITS = {Phase.STEPPING: 10, Phase.BUILDING: 300, Phase.STORING: 600, Phase.ASKING: 10}


class StoppedConnection:
    """A worker that was stopped in a phase."""

    pid, frames = 1, 7
    spent_ns: tuple[int, ...] = ()

    def __init__(self, phase: Phase) -> None:
        self.phase, self.place = phase, WorkerPlace()


@pytest.mark.parametrize("phase", LIMITS)
def test_a_stopped_worker_is_found_in_every_phase(phase: Phase) -> None:
    detector = detector_of(StoppedConnection(phase))
    found = next(second for second in range(1, 1200) if detector.turn(float(second), is_paused=False))
    assert LIMITS[phase] < found <= LIMITS[phase] + 3


def test_a_worker_that_looks_up_while_it_waits_for_a_server_is_left_alone() -> None:
    connection = StoppedConnection(Phase.ASKING)
    numbers = np.zeros(NUM_TIMING, dtype=np.int64)
    timing = Timing(numbers)
    detector = detector_of(connection)
    for second in range(1, 1200):
        timing.begin()
        connection.spent_ns = spent_ns(numbers)
        assert not detector.turn(float(second), is_paused=False)


@pytest.mark.parametrize(("act_s", "limit_s"), [(1, 15), (4, 40), (20, 120)])
def test_a_frozen_server_is_found_by_its_own_history(act_s: int, limit_s: int) -> None:
    connection = StoppedConnection(Phase.STEPPING)
    connection.place = WorkerPlace(is_server=True)
    detector = detector_of(connection, hang_timeout_s=120.0)
    alive_s = 30 * act_s
    found = []
    for second in range(1, alive_s + 200):
        if second <= alive_s and second % act_s == 0:
            connection.frames += 1
        found += [second] if detector.turn(float(second), is_paused=False) else []
    assert limit_s < found[0] - alive_s <= limit_s + 3


def detector_of(connection: Any, *, hang_timeout_s: float = 10.0) -> HangDetector:
    place = connection.place
    slot = Slot((place.group, place.index), is_server=place.is_server, state=SlotState.WORKING)
    handle = slot.worker = WorkerHandle(slot, connection, set(), last_progress=0.0, reached=SlotState.WORKING)
    handle.tickets[1] = None  # type: ignore[assignment]  # that there is one is all that counts
    options = FleetOptions(hang_timeout_s=hang_timeout_s)
    detector = HangDetector(make_job(), options, FleetCounters())
    detector.add(handle)
    return detector
