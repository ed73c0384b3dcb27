"""Workers that make no progress are found, whatever they were doing."""

from collections import deque
from typing import Any

import pytest

from cormorant_testing.collecting import make_job
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.counters import FleetCounters
from cormorant_worker.fleet.hang_detector import HangDetector
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.worker_handle import WorkerHandle
from cormorant_worker.inference.remote_actor import LONGEST_WAIT_S
from cormorant_worker.worker.heartbeat import Phase

LIMITS = {Phase.STEPPING: 10, Phase.BUILDING: 300, Phase.STORING: 600, Phase.ASKING: LONGEST_WAIT_S + 10}


class StoppedConnection:
    """A worker that was stopped in a phase."""

    pid, frames, spent_ns = 1, 7, ()

    def __init__(self, phase: Phase) -> None:
        self.phase, self.place = phase, WorkerPlace()


@pytest.mark.parametrize("phase", LIMITS)
def test_a_stopped_worker_is_found_in_every_phase(phase: Phase) -> None:
    connection: Any = StoppedConnection(phase)
    handle = WorkerHandle(connection, deque(), stream=connection.place, last_progress=0.0, is_ready=True)
    handle.tickets[1] = None  # type: ignore[assignment]  # that there is one is all that counts
    options = FleetOptions(hang_timeout_s=10.0)
    detector = HangDetector(make_job(), options, {handle.slot: handle}, FleetCounters())
    detector.add(handle.slot)
    found = [second for second in range(1, 1200) if detector.turn(float(second), is_paused=False)]
    assert LIMITS[phase] < found[0] <= LIMITS[phase] + 3
