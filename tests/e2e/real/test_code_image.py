"""User code from an image: an init container copies it, or a node that can mounts the image."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cormorant_client.delivery import decode
from cormorant_testing.real_cluster import PREFIX, Installation, build_image
from cormorant_testing.real_job import running, small_job

CODE = """
import gymnasium

def make():
    return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 7.0)
"""


def mounts_images(installed: Installation) -> bool:
    """Whether the API server keeps a pod's image volume (feature gate ImageVolume)."""
    spec = {
        "containers": [{"name": "c", "image": "a"}],
        "volumes": [{"name": "code", "image": {"reference": "b"}}],
    }
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "asks"}, "template": {"spec": spec}}
    shown = installed.jobs("create", "--dry-run=server", "-o", "json", "-f", "-", document=pods, check=False)
    return '"reference": "b"' in shown


@pytest.fixture(params=["copied", "mounted"])
def base(installed: Installation, request: pytest.FixtureRequest) -> Iterator[str]:
    """What the code's image is made from. Only an image that is copied needs `cp`."""
    is_copied = request.param == "copied"
    if not is_copied and not mounts_images(installed):
        pytest.skip("the API server has no image volumes: Kubernetes 1.35, or 1.33 with the feature gate ImageVolume")
    installed.release.upgrade(f"jobs.imageVolumes={'never' if is_copied else 'always'}", chart=installed.chart)
    installed.wait()
    yield installed.images.operator if is_copied else "scratch"
    installed.release.upgrade("jobs.imageVolumes=auto", chart=installed.chart)
    installed.wait()


def test_code_of_an_image_runs(installed: Installation, base: str, tmp_path: Path) -> None:
    image = f"{PREFIX}/my-code-{'of-scratch' if base == 'scratch' else 'with-cp'}:{installed.images.tag}"
    (tmp_path / "my_env.py").write_text(CODE)
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nCOPY my_env.py /code/\n")
    build_image(image, tmp_path)
    env = {"gymnasium": {"entrypoint": "my_env:make", "numEnvs": 2}}
    manifest = small_job("from-image", env, code={"image": image}, collection={"framesPerBatch": 64})
    with running(installed.jobs, manifest) as job:
        batch = job.take()
        assert decode(memoryview(batch.body)).tensordict()["next", "reward"].unique().tolist() == [7.0]
        job.ack(batch)
        job.delete()
