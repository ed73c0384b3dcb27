"""How many workers a job has, over HTTP."""

import os
import signal
from pathlib import Path

from cormorant_testing.collecting import make_job
from cormorant_testing.scripts import until
from cormorant_testing.serving import serve, take


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
