"""What a head reads and counts, whatever the size of its fleet."""

import time
from pathlib import Path
from typing import Any

from cormorant_api.http.uploads import UploadRoom
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_testing.collecting import make_job
from cormorant_testing.scripts import until
from cormorant_testing.serving import Served
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.stats import FleetStats


class CountingFleet(WorkerFleet):
    """Counts the readings of all workers, and the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.readings = {True: 0, False: 0}
        super().__init__(*args, **kwargs)

    def stats(self, *, workers: bool = True) -> FleetStats:
        self.readings[workers] += 1
        return super().stats(workers=workers)


def test_housekeeping_reads_all_workers_once_a_second(folder: Path) -> None:
    with HeadServer(make_job(), HeadSettings(port=0, directory=folder)) as server:
        began = time.monotonic()
        fleet = server.start_fleet(FleetOptions(workers=1), make=CountingFleet)
        until(lambda: fleet.readings[False] >= 4)
        for _ in range(20):
            assert Served(server).reader.get("/v1/status").status == 200
        assert fleet.readings[True] <= 1 + (time.monotonic() - began) / 1.0
        assert fleet.readings[True] < fleet.readings[False]


def test_a_state_counts_twice_among_uploads(endless: Served) -> None:
    uploads = endless.server.head.uploads
    held = endless.writer.post("/v1/pauses", {"owner": "restoring", "wait_seconds": 60})
    try:
        state = endless.writer.get("/v1/state").body
        endless.server.head.uploads = UploadRoom(most_bytes=2 * len(state), most=8)
        with endless.server.head.uploads.of(1):
            busy = endless.writer.put("/v1/state", state)
        assert (busy.status, busy.kind) == (429, "busy"), "the body and what workers are sent do not fit"
        assert endless.writer.put("/v1/state", state).status == 200
    finally:
        endless.server.head.uploads = uploads
        endless.writer.delete(held.headers["location"])
