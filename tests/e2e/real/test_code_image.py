"""User code from an image: an init container copies it (the node of these tests mounts no image volumes)."""

from pathlib import Path

import pytest

from cormorant_client.batch import decode
from cormorant_testing.real_cluster import PREFIX, Installation, build_image
from cormorant_testing.real_job import SMALL, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

CODE = """
import gymnasium

def make():
    return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 7.0)
"""


def test_code_of_an_image_runs(installed: Installation, tmp_path: Path) -> None:
    image = f"{PREFIX}/my-code:{installed.images.tag}"
    (tmp_path / "my_env.py").write_text(CODE)
    (tmp_path / "Dockerfile").write_text(f"FROM {installed.images.operator}\nCOPY my_env.py /code/\n")
    build_image(image, tmp_path)
    manifest = {
        "apiVersion": "cormorant.dev/v1alpha1",
        "kind": "CollectorJob",
        "metadata": {"name": "from-image"},
        "spec": {
            "env": {"gymnasium": {"entrypoint": "my_env:make", "numEnvs": 2}},
            "policy": {"random": {}},
            "code": {"image": image},
            "collection": {"framesPerBatch": 64},
            "head": {"resources": SMALL},
            "workerGroups": [{"name": "cpu", "resources": SMALL}],
            "replicas": 1,
        },
    }
    with running(installed.jobs, manifest) as job:
        batch = job.take()
        assert decode(memoryview(batch.body)).tensordict()["next", "reward"].unique().tolist() == [7.0]
        job.ack(batch)
        job.delete()
