"""Policies on a CUDA device: the same frames as on the CPU, through pinned memory, on the device that was asked for."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from cormorant import RayOptions, make_collector, open_fleet
from cormorant.policies import mlp
from cormorant_testing.collecting import assert_same
from cormorant_worker.policy.actor import Staging
from manifest_making import collector_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


def job(*, device: str = "cpu", entrypoint: str = "mlp", task: str = "CartPole-v1", exploration: str = "mode") -> dict:
    return collector_job(
        "cuda",
        {
            "env": {"envpool": {"taskId": task, "numEnvs": 16, "numThreads": 1}},
            "policy": {"entrypoint": f"cormorant.policies:{entrypoint}", "explorationType": exploration},
            "collection": {"framesPerBatch": 128, "totalFrames": 640, "seed": 3},
            "workerGroups": [{"name": "main", "device": device}],
        },
    )


def test_staging_brings_arrays_to_the_device_and_back() -> None:
    staging = Staging(torch.device("cuda"))
    generator = np.random.default_rng(0)
    for n in (4, 2, 8):
        arrays = [generator.normal(size=(n, 3)), generator.integers(0, 255, (n, 2, 5)).astype(np.uint8)]
        uploaded = staging.upload(arrays)
        assert all(tensor.is_cuda for tensor in uploaded)
        for sent, back in zip(arrays, staging.download([tensor + 1 for tensor in uploaded]), strict=True):
            np.testing.assert_array_equal(back, sent + 1)


@pytest.mark.parametrize(
    ("entrypoint", "task"), [("mlp", "CartPole-v1"), ("lstm", "CartPole-v1"), ("atari_cnn", "Pong-v5")]
)
def test_greedy_policy_has_the_cpus_shapes_and_dtypes(entrypoint: str, task: str) -> None:
    with make_collector(job(entrypoint=entrypoint, task=task)) as on_cpu:
        expected = on_cpu.collect(num_steps=64)
    with make_collector(job(entrypoint=entrypoint, task=task), device="cuda") as on_cuda:
        found = on_cuda.collect(num_steps=64)
    for key, value in expected.items(include_nested=True, leaves_only=True):
        assert (found[key].shape, found[key].dtype, found[key].device) == (value.shape, value.dtype, value.device)
    # The first step is greedy on the same observations; later ones may part where two logits are nearly equal.
    assert torch.equal(found["observation"][:, 0], expected["observation"][:, 0])


def test_drawn_actions_follow_the_seed_not_the_callers_generator() -> None:
    def collect() -> torch.Tensor:
        with make_collector(job(exploration="random"), device="cuda") as collector:
            before = torch.cuda.get_rng_state()
            action = collector.collect(num_steps=320)["action"]
            assert torch.equal(torch.cuda.get_rng_state(), before)
            return action

    assert torch.equal(collect(), collect())


@pytest.mark.parametrize(
    ("workers", "engine"),
    [(1, None), pytest.param(2, RayOptions(num_gpus=0.5), marks=pytest.mark.slow, id="sharing a GPU of Ray's")],
)
def test_gpu_group_acts_on_cuda_and_stores_where_told(workers: int, engine: RayOptions | None) -> None:
    with open_fleet(job(device="gpu"), workers=workers, engine=engine, storing_device="cuda") as fleet:
        frames = 0
        for batch in fleet.batches():
            assert batch.device is not None
            assert batch.device.type == "cuda"
            frames += batch.numel()
            if frames == 128:
                applied = fleet.publish(mlp(*fleet.spaces), wait=20).applied
                assert applied == ("main-0", "main-1")[:workers]
    assert frames == 640


@pytest.mark.parametrize("entrypoint", ["mlp", "lstm"])
def test_recorded_steps_are_the_same_frame_by_frame(entrypoint: str) -> None:
    def collect(mode: str) -> list[TensorDict]:
        vector = {"entrypoint": "examples.torch_cartpole:TorchCartPole", "numEnvs": 64, "kwargs": {"device": "cuda"}}
        manifest = job(entrypoint=entrypoint, exploration="random")
        manifest["spec"] |= {"env": {"vector": vector}}
        manifest["spec"]["policy"]["compile"] = mode
        with make_collector(manifest, device="cuda") as collector:
            batches = []
            for version in range(1, 5):
                batches.append(collector.collect(num_steps=16 * 64))
                weights = {name: value * 1.5 for name, value in collector.weights.current()["policy"].items()}
                collector.weights.offer({"policy": weights}, version=version)
            graphs = collector._rollout._rows.graphs
            assert (graphs is None) == (mode == "off")
            assert graphs is None or graphs.num_recorded == 16, graphs.refused
            return batches

    assert_same(collect("auto"), collect("off"))
