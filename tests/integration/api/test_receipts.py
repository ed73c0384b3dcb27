"""Learners tell a new head what was settled: they may be the only ones who know."""

from pathlib import Path
from typing import Any

from cormorant_api.http.tokens import HeadTokens
from cormorant_client.client import connect
from cormorant_testing.collecting import make_job
from cormorant_testing.scripts import unused_port
from cormorant_testing.serving import serve


def test_learner_tells_a_head_without_a_count_what_was_settled(folder: Path) -> None:
    collection = {"mode": "async", "framesPerBatch": 20, "totalFrames": 400}
    job = make_job(num_envs=2, lengths=4, collection=collection, queue={"capacityBatches": 2})
    tokens, port = folder / "tokens.json", unused_port()
    HeadTokens(tokens)  # makes them
    options: dict[str, Any] = {"token_file": tokens, "port": port}
    acknowledged = 0
    with connect(f"http://127.0.0.1:{port}", token_file=tokens) as client:
        with serve(job, directory=folder / "1", epoch=1, **options):
            for _ in range(4):  # each of them acknowledged by an iteration of its own
                acknowledged += sum(batch.num_frames for batch in client.deliveries(frames=20, prefetch=0))
            forged = client._head.receipts["Cormorant-Settled"].replace(".80.", ".380.")
        # Nobody tells it: no operator runs, and the worker went with its pod.
        with serve(job, directory=folder / "2", epoch=2, **options) as second:
            for receipt in (forged, "0.80.", "80", "..", "0.80.\xe9", "9" * 5000):
                second.reader.get("/v1/batches/next?wait=0", Cormorant_Settled=receipt)
            assert second.status["frames"]["settled"] == 0
            acknowledged += sum(batch.num_frames for batch in client.deliveries(frames=20, prefetch=0))
            assert second.status["frames"]["settled"] == acknowledged == 100
        with serve(job, directory=folder / "3", epoch=3, **options) as third:
            acknowledged += sum(batch.num_frames for batch in client.deliveries(prefetch=0))
            assert third.status["frames"]["settled"] == acknowledged == 400


def test_receipt_of_another_job_or_of_this_head_counts_nothing(folder: Path) -> None:
    job = make_job(num_envs=2, lengths=4, collection={"mode": "async", "framesPerBatch": 20})
    with serve(job, directory=folder / "another", epoch=1) as another:
        foreign = another.data.ack(another.data.get("/v1/batches/next?wait=30")).headers["cormorant-settled"]
    with serve(job, directory=folder / "this", epoch=2) as served:
        own = served.data.ack(served.data.get("/v1/batches/next?wait=30")).headers["cormorant-settled"]
        for receipt in (foreign, own):
            served.reader.get("/v1/batches/next?wait=0", Cormorant_Settled=receipt)
        assert served.status["frames"]["settled"] == 20
        assert served.fleet.inherited_frames == 0
