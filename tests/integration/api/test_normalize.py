"""Statistics at the head: acknowledged batches count once, over kill -9 and restart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cormorant_api.control.journal import Journal
from cormorant_client.delivery import Delivery, decode
from cormorant_testing.collecting import make_job, seen_of
from cormorant_testing.heads import HeadProcess
from cormorant_testing.serving import weights_file


def take(api: Any) -> Delivery | None:
    reply = api.get("/v1/batches/next?wait=60")
    return decode(memoryview(reply.body)) if reply.status == 200 else None


def seen_in(batch: Delivery) -> Any:
    return seen_of(batch.tensordict(), batch.statistics)


@pytest.mark.slow
def test_killed_head_neither_loses_nor_doubles_statistics(tmp_path: Path) -> None:
    path, folder = tmp_path / "job.yaml", tmp_path / "head"
    collection = {"totalFrames": 400, "normalize": {"observation": {"clip": 3}, "reward": {}}}
    job = make_job(policy="seer", action="box", lengths=(3, 7), step_s=0.001, collection=collection)
    path.write_text(yaml.safe_dump(job.to_document()))
    seen: list[np.ndarray] = []
    with HeadProcess(path, folder) as head:
        api = head.api()
        for number in range(4):
            batch = take(api)
            assert batch is not None
            seen.append(seen_in(batch))
            api.post(f"/v1/batches/{batch.id}/ack")
            if number == 2:
                assert api.put("/v1/models/policy/weights?version=7", weights_file(7), Prefer="wait=60").status == 200
        published = {number: found for number, found in batch.statistics.items() if number == 7}
        lost = take(api)
        assert lost is not None
        head.kill()
    with HeadProcess(path, folder) as head:
        api = head.api()
        while (batch := take(api)) is not None:
            assert batch.min_version == 7
            assert batch.statistics[7]["observation"]["count"] == 60, "a version keeps what it was published with"
            assert not published or batch.statistics == published
            seen.append(seen_in(batch))
            api.post(f"/v1/batches/{batch.id}/ack")
        assert head.process.wait(60) == 0
    whole = np.concatenate(seen)
    assert len(whole) == 400
    kept = Journal(folder).statistics
    assert kept is not None
    found = kept.moments["observation"]
    assert found.count == 400
    scale = np.abs(whole).max()
    assert np.abs(found.mean - whole.mean(axis=0)).max() <= 1e-9 * scale
    assert np.abs(found.m2 / 400 - whole.var(axis=0)).max() <= 1e-9 * scale**2
