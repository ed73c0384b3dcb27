"""The command line and a job that really collects: its head is reached through the API server, its code is a ConfigMap.

An operator of its own, beside the cluster, looks after the test's namespace.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import cormorant
from cormorant.errors import BadAddress
from cormorant.policies import mlp
from cormorant_testing.kubectl import Namespace
from cormorant_testing.operator_scene import Cli
from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import small_job

pytestmark = pytest.mark.slow

HIDDEN = [1024, 1024]
START_S = 240
CODE = f"""
from cormorant.policies import mlp

def make(observation_space, action_space):
    return mlp(observation_space, action_space, hidden={HIDDEN})
"""


class Job(Cli):
    """Commands about a submitted job. An operator beside the cluster looks after it."""

    name = "cart"

    def make(self) -> Path:
        package = self.folder / "code" / "my_pkg"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "policies.py").write_text(CODE)
        document = small_job(
            self.name,
            {"gymnasium": {"id": "CartPole-v1", "vectorization": "subprocess", "numEnvs": 2}},
            policy="my_pkg.policies:make",
            image=self.image,
            collection={"framesPerBatch": 64},
            output={"queue": {"capacityBatches": 4, "onFull": "drop_oldest"}},
        )
        path = self.folder / "cart.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def weights(self, name: str) -> Path:
        """A file of weights for the job's policy."""
        import gymnasium
        from safetensors.torch import save_file

        env = gymnasium.make("CartPole-v1")
        path = self.folder / name
        save_file(mlp(env.observation_space, env.action_space, hidden=HIDDEN).state_dict(), path)
        return path


@pytest.fixture(scope="module")
def job(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Namespace("kube-real") as namespace:
        made = Job(namespace, tmp_path_factory.mktemp("cli"), image=installed.images.job)
        with made.operator():
            code = str(made.folder / "code")
            made.good("submit", str(made.make()), "--code", code)
            made.until_ready(within_s=START_S)
            yield made
            made.delete()


def test_weights_go_out_and_come_back(job: Job) -> None:
    from safetensors.torch import load_file

    file, back = job.weights("sent.safetensors"), job.folder / "back.safetensors"
    sent = load_file(file)
    assert file.stat().st_size > 4_000_000  # many pieces of a forwarded connection
    assert job.good("weights", "push", str(file), "cart", "--wait", "60").startswith(
        "version 1: applied, 1 of 1 workers"
    )
    job.good("weights", "pull", str(back), "cart")
    got = load_file(back)
    assert all((got[name] == tensor).all() for name, tensor in sent.items())
    assert "version 1" in job.good("weights", "list", "cart")


def test_a_script_reads_and_trains_the_job_by_its_name(job: Job) -> None:
    """`cormorant.connect("cart")`: what two processes read, and weights, go through the API server."""
    with cormorant.connect("cart", namespace=job.namespace.name) as fleet:
        receipt = fleet.publish(mlp(*fleet.spaces, hidden=HIDDEN), wait=60)
        assert receipt.applied == ("cpu-0",)
        assert fleet.version == receipt.version == fleet.stats().version
        with fleet.batches(frames=192) as batches:
            assert [batch.shape for batch in batches] == [(2, 32)] * 3
        (shard,) = pickle.loads(pickle.dumps(fleet.streaming_split(1)))
        script = "import pickle, sys; print(next(pickle.load(sys.stdin.buffer).iter_batches()).numel())"
        said = subprocess.run(
            [sys.executable, "-c", script], input=pickle.dumps(shard), capture_output=True, check=True
        )
        assert int(said.stdout) == 64
        with fleet.pause(wait=60):
            assert fleet.stats().is_paused
    with pytest.raises(BadAddress, match="nobody"):
        cormorant.connect("nobody", namespace=job.namespace.name)


def test_status_asks_the_head(job: Job) -> None:
    assert job.good("status", "cart").splitlines()[0] == "cart: Running"
