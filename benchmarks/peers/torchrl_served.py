"""TorchRL's AsyncBatchedCollector beside `python -m benchmarks.inference device`: frames/s of 8 CartPoles with a policy
of 20 ms an act. `.venv-peers/bin/python -m benchmarks.peers.torchrl_served`
"""

import time
import warnings

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import AsyncBatchedCollector
from torchrl.envs import GymEnv

ENVS = 8
FRAMES_PER_BATCH = 80
SECONDS = 8.0


class Device(TensorDictModuleBase):
    """Sleeps for 20 ms, in place of a device."""

    in_keys, out_keys = ("observation",), ("action",)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(0.02)
        return tensordict.set("action", torch.zeros(tensordict.batch_size, dtype=torch.int64))


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def frames_per_second(**options: object) -> float:
    collector = AsyncBatchedCollector(
        [make_env] * ENVS, frames_per_batch=FRAMES_PER_BATCH, max_batch_size=ENVS, **options
    )
    try:
        batches = iter(collector)
        for _ in range(2):
            next(batches)
        began, frames = time.monotonic(), 0
        while time.monotonic() < began + SECONDS:
            frames += next(batches).numel()
        return frames / (time.monotonic() - began)
    finally:
        collector.shutdown()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for env_backend in ("threading", "multiprocessing"):
        for rows in (1, ENVS // 2, ENVS):
            found = frames_per_second(
                policy_factory=Device, env_backend=env_backend, transport="driver", min_batch_size=rows
            )
            print(f"environments {env_backend}, min_batch_size {rows}: {found:.0f} frames/s", flush=True)
