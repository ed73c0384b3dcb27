"""Pauses, state, events, sizes, roles and health over HTTP."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
import safetensors.numpy
import structlog

from cormorant_api.errors import HeadFault, StoreError
from cormorant_api.server import HeadServer
from cormorant_api.settings import HeadSettings, bound, listen_early
from cormorant_client.delivery import decode
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.frame_loop import attempt_of
from cormorant_testing.scripts import until, unused_port
from cormorant_testing.serving import Api, Served, serve, weights_file
from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.options import FleetOptions


def test_fleet_is_paused_while_a_lease_is_held(endless: Served) -> None:
    one = endless.writer.post("/v1/pauses", {"owner": "one", "reason": "eval", "wait_seconds": 60})
    two = endless.writer.post("/v1/pauses", {"owner": "two", "ttl_seconds": 60, "wait_seconds": 60})
    assert (one.status, two.status, two.json["state"]) == (201, 201, "paused")
    assert endless.writer.post("/v1/pauses", {"owner": "two"}).status == 200
    before = endless.status["frames"]["stepped"]
    time.sleep(0.3)
    assert endless.status["frames"]["stepped"] == before
    assert endless.writer.delete(one.headers["location"]).status == 204
    pauses = endless.reader.get("/v1/pauses").json
    assert (pauses["state"], [lease["owner"] for lease in pauses["leases"]]) == ("paused", ["two"])
    assert endless.status["phase"] == "Paused"
    assert endless.writer.delete(two.headers["location"]).status == 204
    assert endless.writer.delete(two.headers["location"]).status == 204, "gone already"
    until(lambda: endless.reader.get("/v1/pauses").json["state"] == "running")
    endless.data.take()


def test_a_directory_has_one_head_at_a_time(tmp_path: Path) -> None:
    job, settings = make_job(), HeadSettings(port=0, directory=tmp_path)
    words = rf"directory .* is in use by process {os.getpid()} on .* stop that head"
    with HeadServer(job, settings), pytest.raises(StoreError, match=words):
        HeadServer(job, settings)
    HeadServer(job, settings).close()
    with pytest.raises(StoreError, match=r"cannot write to /proc/run: .*; mount it writable for this user, free space"):
        HeadServer(job, HeadSettings(port=0, directory=Path("/proc/run")))


def test_a_state_needs_a_pause_and_must_be_one(endless: Served) -> None:
    saved = endless.writer.get("/v1/state")
    assert (saved.status, saved.headers["content-type"]) == (200, "application/vnd.safetensors")
    assert endless.writer.put("/v1/state", saved.body).kind == "not-paused"
    endless.writer.post("/v1/pause", {"wait_seconds": 60})
    try:
        state = endless.writer.get("/v1/state").body
        assert [lease["owner"] for lease in endless.reader.get("/v1/pauses").json["leases"]] == ["default"], "its own"
        assert endless.data.take().status == 200
        assert endless.writer.get("/v1/state").body == state, "what waits in the queue is no part of it"
        assert endless.writer.put("/v1/state", b"x" * 100).kind == "malformed-safetensors"
        assert endless.writer.put("/v1/state", weights_file(1)).kind == "state-mismatch"
        for old, new in ((b"frames", b"fremes"), (b'\\"frames\\": ', b'\\"frames\\":-'), (b"cpu-0", b"cpu-9")):
            reply = endless.writer.put("/v1/state", state.replace(old, new, 1))
            assert (reply.status, reply.kind) == (422, "state-mismatch"), (old, reply.body)
        assert endless.writer.put("/v1/state", state).status == 200
    finally:
        endless.writer.post("/v1/resume")
    assert endless.data.take().status == 200


def test_heads_of_requests_are_bounded(endless: Served) -> None:
    reply = endless.anonymous.get("/livez", X_Long="x" * 1_000_000)
    assert (reply.status, reply.kind) == (400, "malformed-request")
    assert endless.anonymous.get("/livez").status == 200


def test_a_json_body_that_does_not_come_is_not_waited_for(endless: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cormorant_api.routes.routing._JSON_WITHIN_S", 0.2)
    kinds = {"Content_Type": "application/json", "Content_Length": "100"}
    reply = endless.writer.call("POST", "/v1/pause", b'{"owner": ', **kinds)
    assert (reply.status, reply.kind) == (408, "upload-stalled")
    assert "10 bytes came" in reply.json["detail"]


def test_early_refused_body_closes_its_connection(endless: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cormorant_api.http.listener._REST_WITHIN_S", 0.2)
    connection = http.client.HTTPConnection("127.0.0.1", endless.anonymous.port, timeout=30)
    connection.request("PUT", "/v1/models/policy/weights", b"x" * 100, {"Content-Length": str(1 << 20)})
    answer = connection.getresponse()
    assert (answer.status, bool(answer.read())) == (401, True)
    assert connection.sock.recv(1) == b"", "the head closes it"
    connection.close()
    whole = http.client.HTTPConnection("127.0.0.1", endless.anonymous.port, timeout=30)
    for _ in range(2):  # all of it was sent: the connection serves on
        whole.request("PUT", "/v1/models/policy/weights", b"x" * 100)
        refused = whole.getresponse()
        assert (refused.status, bool(refused.read())) == (401, True)
        time.sleep(0.3)
    whole.close()


def test_the_documents_need_no_token_and_nothing_from_elsewhere(endless: Served) -> None:
    assert b'"ge":' not in endless.anonymous.get("/openapi.json").body, "bounds have the names of JSON Schema"
    page = endless.anonymous.get("/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = page.body.decode()
    links = re.findall(r"""(?:src|href)=["']([^"']+)""", text)
    assert len(links) == 3
    for link in links:
        below = urljoin("http://proxy/jobs/a/docs", link)  # behind a proxy that serves the head below a path
        assert below.startswith("http://proxy/jobs/a/docs-static/")
        assert endless.anonymous.get(below.removeprefix("http://proxy/jobs/a")).status == 200
    assert "url: 'openapi.json'" in text
    assert '"validatorUrl": null' in text, "no badge from elsewhere"


def read_events(api: Api, *, limit: int, **headers: str) -> list[tuple[str, str, str]]:
    with api.listen("/v1/events", **headers) as events:
        return list(islice(events, limit))


@pytest.mark.parametrize(
    ("total", "error", "expected"),
    [
        (60, None, {"state": "Completed", "frames": 60}),
        (10**9, None, {"state": "Stopped"}),
        (10**9, FleetError("no more"), {"state": "Failed", "reason": "no more"}),
    ],
)
def test_the_last_event_says_how_the_job_ended(
    tmp_path: Path, total: int, error: FleetError | None, expected: dict[str, Any]
) -> None:
    frames = {"framesPerBatch": 20, "totalFrames": total}
    job = make_job(num_envs=2, lengths=4, dataset=f"file://{tmp_path}/data", collection=frames)
    with ThreadPoolExecutor(1) as pool:
        with suppress(FleetError), serve(job, directory=tmp_path / "head") as served:
            heard = pool.submit(read_events, served.reader, limit=10**6, Last_Event_ID="")
            until(lambda: served.server.head.events.listeners == 1)
            assert served.data.get("/v1/batches/next").kind == "no-queue"
            if total == 60:
                until(lambda: served.server.head.end_state == "Completed")
                time.sleep(0.5)  # the housekeeping thread may notice the end before the main thread does
                assert (served.status["phase"], served.server.wait(lambda: False)) == ("Completed", "done")
            elif error is None:
                assert served.server.wait(lambda: True) == "interrupted"
            if error is not None:
                raise error
        events = heard.result(60)
    last = json.loads(events[-1][2])
    assert error or last["frames"] == served.fleet.stats().frames, "with the batches that were open"
    assert {name: last[name] for name in expected} == expected
    assert [i for i, (kind, *_) in enumerate(events) if kind == "ended"] == [len(events) - 1]


def test_events_tell_what_happens_and_can_be_resumed(endless: Served) -> None:
    ring = endless.server.head.events
    until(lambda: ring.listeners == 0)
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(read_events, endless.reader, limit=1)
        # A fleet that has just begun tells of batches before it is asked.
        until(lambda: ring.listeners == 1 or one.done())
        update = endless.writer.put("/v1/models/policy/weights", weights_file(9)).json
        assert endless.reader.get(f"/v1/updates/{update['update_id']}?wait=60").json["state"] == "applied"
        (first,) = one.result(60)
    epoch, _, digits = first[1].rpartition("-")
    number = int(digits)

    def has_all() -> bool:
        events, _ = ring.read(number) or ([], 0)
        return len(events) >= 8 and {"accepted", "applied", "update", "published"} <= {event.kind for event in events}

    # How many batches one worker makes before the other takes the new weights depends on the machine.
    until(lambda: endless.data.take(wait=0.1) and has_all())
    many = read_events(endless.reader, limit=ring.end - number, Last_Event_ID=f"{epoch}-{number - 1}")
    assert many[0] == first
    numbers = [int(event_id.rpartition("-")[2]) for _, event_id, _ in many]
    assert numbers == list(range(number, number + len(numbers)))
    published = [json.loads(data) for kind, _, data in many if kind == "published"]
    assert [event["version"] for event in published] == [update["version"]]
    assert {"accepted", "applied", "update"} <= {kind for kind, *_ in many}
    assert read_events(endless.reader, limit=3, Last_Event_ID=many[4][1]) == many[5:8]
    until(lambda: ring.listeners == 0)


def test_workers_fill_the_slots_that_are_asked_for(tmp_path: Path) -> None:
    def ready() -> list[str]:
        return [worker["id"] for worker in served.reader.get("/v1/workers").json["workers"] if worker["ready"]]

    with serve(make_job(num_envs=2, lengths=4, workers=40), directory=tmp_path) as served:
        assert ready() == ["cpu-0"]
        status = served.status
        assert ([group["desired"] for group in status["groups"]], status["desired"]["groups"]) == ([1], {"cpu": 1})
        assert served.reader.condition("Ready")["message"] == "1 of 1 workers are ready; the manifest asks for 40"
        assert served.operator.put("/v1/desired", {"groups": {"gpu": 1}, "paused": True}).json["known"] == ["cpu"]
        assert served.status["desired"]["paused"], "sizes that are refused do not hold up a pause"
        assert not served.operator.put("/v1/desired", {"paused": False}).json["paused"]
        assert served.operator.put("/v1/desired", {"groups": {"cpu": 0}}).kind == "last-worker"
        asked = served.operator.put("/v1/desired", {"groups": {"cpu": 2}})
        assert (asked.status, asked.json["groups"]) == (200, {"cpu": 2})
        assert served.operator.put("/v1/desired", {}).status == 422
        until(lambda: not served.status["desired"]["pending"])
        until(lambda: len(ready()) == 2)
        frozen = served.fleet.stats().workers[1].pid
        os.kill(frozen, signal.SIGSTOP)
        assert served.operator.put("/v1/desired", {"groups": {"cpu": 1}}).json["pending"], "cpu-1 has not ended"
        os.kill(frozen, signal.SIGCONT)
        until(lambda: served.data.take(wait=0.1) and len(served.reader.get("/v1/workers").json["workers"]) == 1)
        until(lambda: not served.status["desired"]["pending"])
        for empty, workers in (({"cpu": [0, 2]}, ["cpu-1", "cpu-3"]), ({}, ["cpu-0", "cpu-1"])):
            asked = served.operator.put("/v1/desired", {"groups": {"cpu": 2}, "empty_slots": empty})
            assert (asked.status, asked.json["empty_slots"]) == (200, empty)
            until(lambda workers=workers: served.data.take(wait=0.1) and ready() == workers)
            assert served.status["desired"]["empty_slots"] == empty
        nameless = served.operator.put("/v1/desired", {"paused": True, "empty_slots": {"cpu": [0]}})
        assert nameless.status == 422
        assert "empty_slots names cpu and groups does not" in nameless.body.decode()


def test_head_goes_on_where_told_and_says_it_finds_no_weights(tmp_path: Path) -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=4)
    stands = {"epoch": 3, "floor_frames": 1000, "published_version": 7}
    with serve(job, directory=tmp_path, weights_within_s=0.5, **stands) as served:
        assert served.status["frames"]["collected"] >= 1000
        batch = decode(memoryview(served.data.take().body))
        assert (batch.min_version, batch.max_version) == (0, 0)
        ids = batch.tensordict()["collector", "traj_ids"].unique().tolist()
        assert {attempt_of(number)[3] for number in ids} == {2}, "heads have epochs of their own"
        until(lambda: "initial weights" in served.reader.condition("WeightsMissing")["message"])
        events, _ = served.server.head.events.read(0) or ([], 0)
        told = [event.reason for event in events if event.kind == "weights_missing"]
        words = (
            "frames are collected with the policy's initial weights: version 7 was lost with the earlier head; publish "
            "weights, and set head.persistence.claimName to keep them"
        )
        assert told[1:] == [served.reader.condition("WeightsMissing")["message"]] == [words]


def test_port_accepts_connections_before_the_head_serves() -> None:
    host, port = "::" if socket.has_dualstack_ipv6() else "127.0.0.1", unused_port()
    listen_early(host, port)
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    with bound(host, port) as handed_on:
        assert handed_on.getsockname()[:2] == (host, port)
        with pytest.raises(HeadFault, match=f"cannot listen on {host} port {port}: Address already in use; choose"):
            listen_early(host, port)


def test_weights_before_the_first_worker_are_retryable(tmp_path: Path) -> None:
    with HeadServer(make_job(num_envs=2, policy="versioned"), HeadSettings(port=0, directory=tmp_path)) as server:
        early = Served(server)
        reply = early.writer.put("/v1/models/policy/weights", weights_file(1))
        assert (reply.status, reply.kind, reply.headers["retry-after"]) == (503, "no-workers", "2")
        assert (early.anonymous.get("/livez").status, early.anonymous.get("/readyz?wait=0.2").status) == (200, 503)
        threading.Timer(0.5, server.head.close).start()
        assert early.anonymous.get("/readyz?wait=60").status == 503, "it waits no longer than a worker can come"


def test_a_drained_fleet_gives_what_it_has_and_ends(tmp_path: Path) -> None:
    job = make_job(num_envs=2, policy="counter", lengths=(3, 8))
    checker = make_checker(2, lengths=(3, 8))
    with serve(job, directory=tmp_path) as served:
        checker.take(decode(memoryview(served.data.take().body)).tensordict())
        assert served.operator.post("/v1/drain").json["phase"] == "Draining"
        # A learner that waited for the next head with its weights would not take what is left.
        weights = safetensors.numpy.save({"weight": np.ones(1, np.float32)})
        published = served.writer.put("/v1/models/policy/weights", weights, Prefer="wait=60")
        assert (published.status // 100, published.json["version"]) == (2, 1)
        back = served.writer.post("/v1/models/policy:rollback", {"version": 1})
        assert (back.status, back.json["version"]) == (202, 2)
        refused = served.writer.post("/v1/seed", {"seed": 1})
        assert (refused.status, refused.kind) == (503, "draining")
        # A Service that left it out would cut learners off from what is left to take.
        assert served.anonymous.get("/readyz").status == 200
        while (reply := served.data.take()).status != 503:
            if reply.status == 200:
                checker.take(decode(memoryview(reply.body)).tensordict())
        assert (reply.kind, reply.headers["retry-after"]) == ("draining", "2"), "the next head goes on"
        status = served.status
        assert status["frames"]["delivered"] == status["frames"]["collected"] == checker.frames
        assert status["phase"] == "Draining", "the job is not complete"
        assert served.server.wait(lambda: False) == "drained"
        served.server.head.close()
        assert served.server.head.end_state == "Stopped"
        assert served.anonymous.get("/readyz").json == {"ready": False, "reason": "the head is shutting down"}


def test_livez_fails_when_the_fleets_thread_hangs(endless: Served) -> None:
    assert endless.anonymous.get("/livez").body == b"ok\n"
    assert endless.anonymous.get("/readyz").json == {"ready": True, "reason": ""}
    assert endless.anonymous.get("/version").json["api"] == "v1"
    with endless.fleet._changed:  # as long as it is held here, the fleet's thread does not turn
        endless.fleet._loop._turned_at -= 130
        reply = endless.anonymous.get("/livez")
    assert (reply.status, reply.body.split(b" for ")[0]) == (503, b"the fleet's thread has been stuck")
    until(lambda: endless.anonymous.get("/livez").status == 200)


def test_housekeeping_outlives_a_disk_that_is_full(endless: Served) -> None:
    def full(stats: object) -> None:
        told.append("told")
        if len(told) == 1:
            raise StoreError("cannot write: no space left on device; free some")

    told, head = list[str](), endless.server.head
    head.watchers.append(full)
    until(lambda: len(told) > 1)
    head.watchers.remove(full)
    assert head.failure == ""


@pytest.mark.slow
def test_head_ends_although_its_disk_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cormorant_api.control.journal._ANSWER_WITHIN_S", 1.0)
    (folder := tmp_path / "head").mkdir()
    image = tmp_path / "head.ext4"  # memory cannot be frozen
    image.write_bytes(bytes(32 << 20))
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False).returncode:
        pytest.skip("only root may mount a file system")
    with ExitStack() as thawing, structlog.testing.capture_logs() as logged:
        thawing.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
        with serve(make_job(), directory=folder) as served:
            batch = served.data.get("/v1/batches/next?wait=60")
            subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
            thawing.callback(subprocess.run, ["fsfreeze", "--unfreeze", str(folder)], check=True)
            ack = threading.Thread(target=lambda: served.data.ack(batch))
            ack.start()
            until(lambda: served.status["queue"]["acked"] == 1)
        # It has closed: nothing that it waits for would have come before the disk is thawed.
        assert served.fleet.stats().workers == ()
        ack.join(30)
    assert "journal_not_closed" in {line["event"] for line in logged}


def test_request_that_a_closing_head_cancels_is_told_to_retry(tmp_path: Path) -> None:
    go_on = threading.Event()
    with serve(make_job(lengths=4), directory=tmp_path) as served, ThreadPoolExecutor(1) as pool:
        quick = served.server.head.quick.pool
        held = [quick.submit(go_on.wait, 60) for _ in range(4)]
        reply = pool.submit(served.reader.get, "/v1/status")
        until(lambda: quick._work_queue.qsize() > 0)
        closing = threading.Thread(target=served.server.head.close)
        closing.start()
        refused = reply.result(60)
        go_on.set()
        closing.join(60)
        assert all(one.result(60) for one in held)
    assert (refused.status, refused.kind) == (503, "draining")
    assert refused.headers["retry-after"]


def test_waiting_request_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, closing = threading.Event(), threading.Event()
    with HeadServer(make_job(lengths=4), HeadSettings(port=0, directory=tmp_path, grace_s=600)) as server:
        fleet = server.start_fleet(FleetOptions(workers=1))
        close = fleet.close
        monkeypatch.setattr(fleet, "seed", lambda _: asked.set() or (closing.wait(60) and ()))
        monkeypatch.setattr(fleet, "close", lambda: closing.set() or close())
        asking = threading.Thread(target=Served(server).writer.post, args=("/v1/seed", {"seed": 1}))
        asking.start()
        assert asked.wait(30)
    # The request under way has `grace_s`, longer than a test may take; it ends because workers end meanwhile.
    asking.join(30)
    assert not asking.is_alive()
