"""How many workers a job has, over HTTP; and what a head reads and counts, whatever their number."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from cormorant_api.http.bodies import UploadRoom
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings
from cormorant_testing.collecting import make_job
from cormorant_testing.scripts import until
from cormorant_testing.serving import Served, serve, take
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.stats import FleetStats


def test_status_says_that_fewer_workers_run_than_asked_for(folder: Path) -> None:
    with serve(make_job(num_envs=1, lengths=4, workers=40), directory=folder, workers=1) as served:
        status = served.status
        assert [group["desired"] for group in status["groups"]] == [1]
        (ready,) = [found["message"] for found in status["conditions"] if found["type"] == "Ready"]
        assert ready == "1 of 1 workers are ready; the manifest asks for 40"
        assert status["desired"]["groups"] == {"cpu": 1}


def test_workers_are_shown_and_groups_resized(folder: Path) -> None:
    job = make_job(num_envs=2, lengths=4)
    with serve(job, directory=folder, workers=1) as served:
        assert [w["id"] for w in served.reader.get("/v1/workers").json["workers"]] == ["cpu-0"]
        assert served.operator.put("/v1/desired", {"groups": {"gpu": 1}}).json["known"] == ["cpu"]
        assert served.operator.put("/v1/desired", {"groups": {"cpu": 0}}).kind == "last-worker"
        asked = served.operator.put("/v1/desired", {"groups": {"cpu": 2}})
        assert (asked.status, asked.json["groups"]) == (200, {"cpu": 2})
        assert served.operator.put("/v1/desired", {}).status == 422
        until(lambda: not served.status["desired"]["pending"])
        assert served.status["desired"]["error"] == ""
        until(lambda: len([w for w in served.reader.get("/v1/workers").json["workers"] if w["ready"]]) == 2)
        frozen = served.fleet.stats().workers[1].pid
        os.kill(frozen, signal.SIGSTOP)
        assert served.operator.put("/v1/desired", {"groups": {"cpu": 1}}).json["pending"], "cpu-1 has not ended"
        os.kill(frozen, signal.SIGCONT)
        until(lambda: take(served, wait=0.1) and len(served.reader.get("/v1/workers").json["workers"]) == 1)
        until(lambda: not served.status["desired"]["pending"])


def test_workers_fill_the_slots_that_are_asked_for(folder: Path) -> None:
    job = make_job(num_envs=2, lengths=4)
    with serve(job, directory=folder, workers=1) as served:
        for empty, workers in (({"cpu": [0, 2]}, ["cpu-1", "cpu-3"]), ({}, ["cpu-0", "cpu-1"])):
            asked = served.operator.put("/v1/desired", {"groups": {"cpu": 2}, "empty_slots": empty})
            assert (asked.status, asked.json["empty_slots"]) == (200, empty)
            until(
                lambda workers=workers: (
                    take(served, wait=0.1)
                    and [w["id"] for w in served.reader.get("/v1/workers").json["workers"] if w["ready"]] == workers
                )
            )
            assert served.status["desired"]["empty_slots"] == empty
        nameless = served.operator.put("/v1/desired", {"paused": True, "empty_slots": {"cpu": [0]}})
        assert nameless.status == 422
        assert "empty_slots names cpu and groups does not" in nameless.body.decode()


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
