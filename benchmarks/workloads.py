"""What is stepped by whom. Standard library only: it is imported under every interpreter that takes part."""

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One environment, one policy, one number of environments."""

    name: str
    task_id: str
    """EnvPool's name of the environment."""
    num_envs: int
    policy: Literal["mlp", "atari_cnn", "random"]
    steps_per_batch: int
    """T of every `[B, T]` batch, for every contender, however the environments are shared out."""
    phantom_steps: int = 0
    """Untimed vector steps in which the bare loop's phantom share is counted; 0 where it is under 0.2 %."""

    def share(self, workers: int) -> int:
        """Environments of one of `workers` equal workers."""
        return self.num_envs // workers


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="cartpole-8",
            task_id="CartPole-v1",
            num_envs=8,
            policy="mlp",
            steps_per_batch=256,
            phantom_steps=4000,
        ),
        Workload(
            name="cartpole-64",
            task_id="CartPole-v1",
            num_envs=64,
            policy="mlp",
            steps_per_batch=64,
            phantom_steps=1000,
        ),
        Workload(name="halfcheetah-64", task_id="HalfCheetah-v4", num_envs=64, policy="mlp", steps_per_batch=64),
        Workload(name="pong-64", task_id="Pong-v5", num_envs=64, policy="atari_cnn", steps_per_batch=16),
        Workload(
            name="random-cartpole-64",
            task_id="CartPole-v1",
            num_envs=64,
            policy="random",
            steps_per_batch=64,
            phantom_steps=2000,
        ),
        Workload(
            name="random-ant-64",
            task_id="Ant-v4",
            num_envs=64,
            policy="random",
            steps_per_batch=64,
            phantom_steps=400,
        ),
        Workload(name="random-pong-64", task_id="Pong-v5", num_envs=64, policy="random", steps_per_batch=32),
    )
}


def num_cores() -> int:
    """Cores this process may use: what the bare loop gives to EnvPool."""
    return len(os.sched_getaffinity(0))
