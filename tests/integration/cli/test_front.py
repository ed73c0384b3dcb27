"""The Python API, as a script uses it."""

import sys
from pathlib import Path

import pytest

from cormorant import load_job, open_fleet
from cormorant_testing.commands import START_S, Written
from cormorant_worker.errors import ManifestError, UnknownEnv


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.timeout(3 * START_S)
def test_a_fleet_from_a_path_finds_its_policy_beside_it(write: Written, tmp_path: Path) -> None:
    (tmp_path / "beside_policies.py").write_text(
        "from cormorant.policies import mlp\ndef make(o, a):\n    return mlp(o, a, hidden=[8])\n"
    )
    collection = {"framesPerBatch": 64, "totalFrames": 300}
    with open_fleet(write(collection=collection, policy={"entrypoint": "beside_policies:make"}), workers=1) as fleet:
        frames = [batch.numel() for batch in fleet.batches()]
    assert frames == [64, 64, 64, 64, 44]


def test_one_of_several_jobs_is_chosen_by_name(write: Written) -> None:
    path = write()
    path.write_text(path.read_text() + "---\n" + path.read_text().replace("name: small", "name: other"))
    with pytest.raises(ManifestError, match=r"holds 2 CollectorJobs \(small, other\); choose one by its name"):
        load_job(path)
    with pytest.raises(ManifestError, match='holds no CollectorJob named "third"'):
        load_job(path, name="third")
    assert load_job(path, name="other").metadata.name == "other"


def test_an_unknown_task_is_refused_before_any_worker_starts(write: Written) -> None:
    with pytest.raises(UnknownEnv, match='EnvPool has no task "Pnog-v5"; did you mean Pong-v5'):
        open_fleet(write(env={"envpool": {"taskId": "Pnog-v5", "numEnvs": 4}}))
