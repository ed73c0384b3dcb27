"""Batches over HTTP: each at least once, none after its acknowledgement, all frames exactly; and what slow or dead
consumers do to the others. Learners tell a new head what was settled: they may be the only ones who know.
"""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cormorant_api.head import Head
from cormorant_api.http.tokens import HeadTokens
from cormorant_api.settings import HeadSettings
from cormorant_client.client import connect
from cormorant_client.delivery import decode
from cormorant_contract.job import Metadata
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.scripts import until, unused_port
from cormorant_testing.serving import Served, serve, weights_file


def test_acknowledging_releasing_and_unknown_batches(endless: Served) -> None:
    first = endless.data.get("/v1/batches/next?wait=30&consumer=one")
    batch, decoded = first.batch, decode(memoryview(first.body))
    assert (decoded.id, decoded.num_frames) == (batch, int(first.headers["cormorant-frames"])) == (batch, 20)
    assert int(first.headers["cormorant-min-version"]) == decoded.min_version
    assert first.headers["content-type"] == "application/vnd.safetensors"
    assert first.headers["cormorant-ack-within"] == "1"
    assert endless.data.post(f"/v1/batches/{batch}/release?delivery=1").status == 204
    again = endless.data.get("/v1/batches/next?wait=30&consumer=two")
    assert again.batch == batch
    assert again.headers["cormorant-delivery"] == "2"
    rest = len(again.body) - int.from_bytes(again.body[:8], "little")
    assert again.body[-rest:] == first.body[-rest:]
    assert endless.data.post(f"/v1/batches/{batch}/ack").status == 204
    assert endless.data.post(f"/v1/batches/{batch}/ack").status == 204
    assert endless.data.post(f"/v1/batches/{batch}/release?delivery=1").status == 204
    following = endless.data.get("/v1/batches/next?wait=30&consumer=two")
    assert following.batch != batch
    endless.data.ack(following)
    assert endless.data.post("/v1/batches/nope-1/ack").kind == "unknown-batch"


def test_disk_that_hangs_holds_up_acknowledgements_alone(endless: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cormorant_api.routes.batches._KEPT_WITHIN_S", 0.3)
    api = endless.data
    batch = api.get("/v1/batches/next?wait=30").batch
    answered = threading.Event()
    endless.server.head.journal._writer.submit(answered.wait)  # until it is set, nothing is written
    try:
        for _ in range(2):  # a repetition is not durable before what it repeats
            reply = api.post(f"/v1/batches/{batch}/ack")
            assert (reply.status, reply.kind, reply.headers["retry-after"]) == (503, "store-failed", "2")
            assert f"the acknowledgement of {batch} was not written down within 0.3 s" in reply.json["detail"]
        other = api.get("/v1/batches/next?wait=30")
        assert (other.status, other.batch != batch) == (200, True)
        assert endless.reader.get("/v1/status").status == 200
    finally:
        answered.set()
    assert api.post(f"/v1/batches/{batch}/ack").status == 204
    assert api.ack(other).status == 204


@pytest.mark.slow
def test_calls_that_wait_for_a_frozen_worker_leave_batches_their_threads(tmp_path: Path) -> None:
    with serve(make_job(num_envs=2, lengths=(3, 8)), directory=tmp_path, workers=2) as served:
        # Until the first batch is taken, a seed drops all queued batches, so that it applies to the first one.
        assert served.data.take().status == 200
        pid = served.fleet.stats().workers[0].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            frozen = served.fleet._core.slots["cpu", 0].worker
            # Batches are taken until it has a ticket; the other worker fills the queue again.
            until(lambda: frozen.tickets or served.data.take(wait=1).status == 0)
            until(lambda: served.status["queue"]["waiting"])
            answers: list[int] = []
            seeds = [
                threading.Thread(target=lambda: answers.append(served.writer.post("/v1/seed", {"seed": 9}).status))
                for _ in range(20)
            ]
            for seed in seeds:
                seed.start()
            waiting = served.server.head.at_boundary.pool._work_queue
            until(lambda: waiting.qsize() == 20 - 2)
            batch = served.data.call("GET", "/v1/batches/next?wait=10", timeout=20)
            assert (batch.status, answers) == (200, [])
        finally:
            os.kill(pid, signal.SIGCONT)
        for seed in seeds:
            seed.join(60)
        assert answers == [200] * 20


def test_stopped_reader_holds_up_no_control_request(tmp_path: Path) -> None:
    job = make_job(num_envs=2, lengths=4, queue={"capacityBatches": 3}, collection={"framesPerBatch": 20})
    # A head of its own: the batches that it is sent come to other consumers later.
    with (
        serve(job, directory=tmp_path) as served,
        socket.create_connection(("127.0.0.1", served.data.port), 30) as reader,
    ):
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lines = ["GET /v1/batches/next HTTP/1.1", "Host: x", f"Authorization: Bearer {served.data.token}", "", ""]
        reader.sendall("\r\n".join(lines).encode() * 200)  # more answers than fit into the socket's buffers
        for _ in range(20):
            assert served.reader.get("/v1/status", timeout=10).status == 200


def test_with_drop_oldest_what_a_slow_consumer_misses_is_counted(tmp_path: Path) -> None:
    job = make_job(
        num_envs=2, step_s=0.001, collection={"totalFrames": 1000}, lengths=(3, 8),
        queue={"capacityBatches": 2, "onFull": "drop_oldest"},
    )  # fmt: skip
    checker = make_checker(2, versions=False, gaps=True, lengths=(3, 8))
    with serve(job, directory=tmp_path, workers=2, linger_s=1.0) as served:
        while (reply := served.data.get("/v1/batches/next?wait=30")).status == 200:
            time.sleep(0.1)
            checker.take(decode(memoryview(reply.body)).tensordict())
            assert served.data.ack(reply).status == 204
        assert reply.kind == "stream-ended"
        frames = served.status["frames"]
        assert served.writer.post("/v1/seed", {"seed": 1}).kind == "stream-ended"
    assert frames["dropped"].keys() == {"drop_oldest"}
    assert frames["delivered"] == checker.frames
    assert frames["delivered"] + frames["dropped"]["drop_oldest"] == frames["collected"] == frames["stepped"] == 1000
    assert frames["settled"] == 1000, "what was dropped as the oldest is not collected again"


def test_a_job_completes_although_its_consumer_asks_no_more(tmp_path: Path) -> None:
    job = make_job(num_envs=2, lengths=4, collection={"framesPerBatch": 20, "totalFrames": 40})
    with serve(job, directory=tmp_path) as served:
        for _ in range(2):
            assert served.data.ack(served.data.get("/v1/batches/next?wait=30")).status == 204
        until(lambda: served.server.head.is_complete)


def test_weights_published_while_a_consumer_waits_make_batches_too_old(tmp_path: Path) -> None:
    job = make_job(policy="versioned", action="box", collection={"totalFrames": 20})
    with serve(job, directory=tmp_path) as served, ThreadPoolExecutor(1) as pool:
        only = served.data.get("/v1/batches/next?wait=30&consumer=one")
        waiting = pool.submit(served.data.get, "/v1/batches/next?wait=30&consumer=two&max_staleness=0")
        until(lambda: served.server.head.running.feeder.num_waiting == 1)
        assert served.writer.put("/v1/models/policy/weights", weights_file(1)).status == 202
        served.data.post(f"/v1/batches/{only.batch}/release?delivery=1")
        assert waiting.result().kind == "stream-ended", "it was of version 0, and counts as dropped"


def test_learner_tells_a_head_without_a_count_what_was_settled(tmp_path: Path) -> None:
    collection = {"mode": "async", "framesPerBatch": 20, "totalFrames": 400}
    job = make_job(num_envs=2, lengths=4, collection=collection, queue={"capacityBatches": 2})
    tokens, port = tmp_path / "tokens.json", unused_port()
    HeadTokens(tokens)  # makes them
    options: dict[str, Any] = {"token_file": tokens, "port": port}
    acknowledged = 0
    with connect(f"http://127.0.0.1:{port}", token_file=tokens) as client:
        with serve(job, directory=tmp_path / "1", epoch=1, **options):
            for _ in range(4):  # each of them acknowledged by an iteration of its own
                acknowledged += sum(batch.num_frames for batch in client.deliveries(frames=20, prefetch=0))
            forged = client._head.receipts["Cormorant-Settled"].replace(".80.", ".380.")
        # Nobody tells it: no operator runs, and the worker went with its pod.
        with serve(job, directory=tmp_path / "2", epoch=2, **options) as second:
            head = second.server.head
            another = Head(job.model_copy(update={"metadata": Metadata(name="another")}), HeadSettings(), head.tokens)
            receipts = [f"{told}.{of._sign(told)}" for told, of in (("0.380", another), ("2.380", head))]
            for receipt in (*receipts, forged, "0.80.", "80", "..", "0.80.\xe9", "9" * 5000):
                second.reader.get("/v1/batches/next?wait=0", Cormorant_Settled=receipt)
            assert second.status["frames"]["settled"] == 0
            acknowledged += sum(batch.num_frames for batch in client.deliveries(frames=20, prefetch=0))
            assert second.status["frames"]["settled"] == acknowledged == 100
        with serve(job, directory=tmp_path / "3", epoch=3, **options) as third:
            acknowledged += sum(batch.num_frames for batch in client.deliveries(prefetch=0))
            assert third.status["frames"]["settled"] == acknowledged == 400
