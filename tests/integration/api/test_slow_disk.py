"""A head whose disk does not answer for a while."""

import threading
from pathlib import Path

import pytest

from cormorant_testing.chaos.disk import SmallDisk
from cormorant_testing.collecting import make_job
from cormorant_testing.serving import serve


@pytest.mark.slow
def test_a_disk_that_stands_still_holds_up_no_status(tmp_path: Path) -> None:
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
            ack = threading.Thread(target=lambda: answers.append(served.data.post(f"/v1/batches/{batch}/ack").status))
            disk.freeze()
            try:
                ack.start()
                for path in ("/livez", "/v1/status", "/v1/pauses", "/livez", "/v1/status"):
                    ack.join(0.5)
                    assert served.reader.call("GET", path, timeout=30).status == 200
                assert not answers, "it is not acknowledged before it is written down"
            finally:
                disk.thaw()
            ack.join(60)
            assert answers == [204]
            assert served.reader.get("/v1/status").json["frames"]["settled"] == before + 20
    finally:
        disk.close()
