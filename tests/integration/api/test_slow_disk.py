"""A head whose disk does not answer for a while."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from cormorant_testing.chaos.disk import SmallDisk
from cormorant_testing.collecting import make_job
from cormorant_testing.scripts import until
from cormorant_testing.serving import serve, weights_file

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Mounted on `head` in the test's folder."""
    (tmp_path / "head").mkdir()
    found = SmallDisk(tmp_path / "head")
    if not found.is_there:
        pytest.skip("only root may mount a small file system")
    yield found
    found.close()


def test_frozen_disk_holds_up_no_request(tmp_path: Path, disk: SmallDisk) -> None:
    job = make_job(collection={"normalize": {"observation": {}}})
    with serve(job, directory=tmp_path / "head") as served:
        batch = served.data.get("/v1/batches/next?wait=60").headers["cormorant-batch-id"]
        before = served.reader.get("/v1/status").json["frames"]["settled"]
        answers: list[int] = []
        path = f"/v1/batches/{batch}/ack"
        acks = [threading.Thread(target=lambda: answers.append(served.data.post(path).status)) for _ in range(20)]
        disk.freeze()
        try:
            for ack in acks:  # a client repeats what is not answered
                ack.start()
            for path_of_status in ("/livez", "/v1/status", "/v1/pauses", "/metrics", "/livez", "/v1/status"):
                acks[0].join(0.5)
                assert served.reader.call("GET", path_of_status, timeout=30).status == 200
            # Other batches are handed out on the same port.
            assert served.data.call("GET", "/v1/batches/next?wait=30", timeout=40).status == 200
            assert not answers, "it is not acknowledged before it is written down"
        finally:
            disk.thaw()
        for ack in acks:
            ack.join(60)
        assert answers == [204] * 20
        assert served.reader.get("/v1/status").json["frames"]["settled"] == before + 20


def test_frozen_disk_refuses_publishes_in_time(tmp_path: Path, disk: SmallDisk) -> None:
    path = "/v1/models/policy/weights"
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=(3, 8), step_s=0.001)
    with serve(job, directory=tmp_path / "head") as served:
        served.server.head.running.publisher.within_s = 1.0
        disk.freeze()
        try:
            refused = served.writer.call("PUT", path, weights_file(1), timeout=30)
            assert (refused.status, refused.kind) == (503, "store-failed")
            assert served.reader.get("/v1/models").json["version"] == 0
        finally:
            disk.thaw()
        published = served.writer.put(path, weights_file(2), Prefer="wait=60")
        assert (published.status, published.json["version"]) == (200, 1)


def test_head_ends_although_its_disk_is_frozen(
    tmp_path: Path, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cormorant_api.control.journal._ANSWER_WITHIN_S", 1.0)
    monkeypatch.setattr("cormorant_api.server._UNLOCK_S", 1.0)
    try:
        with structlog.testing.capture_logs() as logged:
            with serve(make_job(), directory=tmp_path / "head") as served:
                batch = served.data.get("/v1/batches/next?wait=60").headers["cormorant-batch-id"]
                disk.freeze()
                ack = threading.Thread(target=lambda: served.data.post(f"/v1/batches/{batch}/ack"))
                ack.start()
                until(lambda: served.reader.get("/v1/status").json["queue"]["acked"] == 1)
            # It has closed: nothing that it waits for would have come before the disk is thawed.
            assert served.fleet.stats().workers == ()
            ack.join(30)
        assert {"journal_not_closed", "lock_not_released"} <= {line["event"] for line in logged}
    finally:
        disk.thaw()
