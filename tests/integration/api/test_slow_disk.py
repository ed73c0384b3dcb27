"""A head whose disk does not answer for a while."""

import threading
from pathlib import Path

import pytest

from cormorant_testing.chaos.disk import SmallDisk
from cormorant_testing.collecting import make_job
from cormorant_testing.serving import serve


@pytest.mark.slow
def test_frozen_disk_holds_up_no_request(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    disk = SmallDisk(folder)
    if not disk.is_there:
        pytest.skip("only root may mount a small file system")
    try:
        with serve(make_job(collection={"normalize": {"observation": {}}}), directory=folder) as served:
            batch = served.data.get("/v1/batches/next?wait=60").headers["cormorant-batch-id"]
            before = served.reader.get("/v1/status").json["frames"]["settled"]
            answers: list[int] = []
            path = f"/v1/batches/{batch}/ack"
            acks = [threading.Thread(target=lambda: answers.append(served.data.post(path).status)) for _ in range(20)]
            disk.freeze()
            try:
                for ack in acks:  # a client repeats what is not answered
                    ack.start()
                for path_of_status in ("/livez", "/v1/status", "/v1/pauses", "/livez", "/v1/status"):
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
    finally:
        disk.close()
