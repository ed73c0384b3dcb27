"""Workers that make no progress are found, whatever they were doing."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from cormorant_testing.collecting import make_job
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.timing import Timing, spent_ns
from cormorant_worker.fleet.bookkeeping.counters import FleetCounters
from cormorant_worker.fleet.bookkeeping.hang_detector import HangDetector
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.fleet.options import FleetOptions
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
    found = [second for second in range(1, 1200) if detector.turn(float(second), is_paused=False)]
    assert LIMITS[phase] < found[0] <= LIMITS[phase] + 3


def test_a_worker_that_looks_up_while_it_waits_for_a_server_is_left_alone() -> None:
    connection = StoppedConnection(Phase.ASKING)
    numbers = np.zeros(NUM_TIMING, dtype=np.int64)
    timing = Timing(numbers)
    detector = detector_of(connection)
    for second in range(1, 1200):
        timing.begin()
        connection.spent_ns = spent_ns(numbers)
        assert not detector.turn(float(second), is_paused=False)


def detector_of(connection: Any) -> HangDetector:
    handle = WorkerHandle(connection, deque(), stream=connection.place, last_progress=0.0, is_ready=True)
    handle.tickets[1] = None  # type: ignore[assignment]  # that there is one is all that counts
    options = FleetOptions(hang_timeout_s=10.0)
    detector = HangDetector(make_job(), options, {handle.slot: handle}, FleetCounters())
    detector.add(handle.slot)
    return detector
