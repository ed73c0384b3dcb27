"""Cormorant with the PPO of examples/ppo.py, which leaves collecting as the only difference between these kinds:

process     one process (`make_collector`)
on-policy   two workers, `maxStaleness: 0`: they rest while the learner learns
behind      two workers that collect with the version before while the learner learns; the clipped ratio is to the
            policy that acted
loop        a plain loop over EnvPool in the same process, without Cormorant, as single-file scripts have it
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.train.task import Run, Task, main

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from ppo import Agent, Ppo, Settings, SharedAgent, make_critic

Tensors = Mapping[str, torch.Tensor]


def learn(task: Task, start: Callable[[], Run], kind: str) -> Run:
    return {"process": _process, "on-policy": _workers, "behind": _workers, "loop": _loop}[kind](task, start, kind)


def _make_ppo(task: Task, observation_space: Any, action_space: Any) -> Ppo:
    from cormorant.policies import atari_cnn, mlp

    settings = Settings(**{constant.name: getattr(task, constant.name) for constant in fields(Settings)})
    if task.policy == "atari_cnn":
        return Ppo(SharedAgent(atari_cnn(observation_space, action_space), torch.nn.Linear(512, 1)), settings)
    return Ppo(Agent(mlp(observation_space, action_space), make_critic(observation_space.shape[0])), settings)


def _until_reached(
    ppo: Ppo, run: Run, take: Callable[[], TensorDict], publish: Callable[[Tensors], Any] = lambda weights: None
) -> Run:
    while True:
        with run.timed("waiting"):
            batch = take()
        mask = batch.get(("collector", "mask"), None)
        frames = batch.numel() if mask is None else int(mask.sum())
        reward, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
        if batch["observation"].dtype == torch.float64:  # MuJoCo's; the critic takes float32
            batch = batch.apply(lambda leaf: leaf.float() if leaf.dtype == torch.float64 else leaf)
        with run.timed("learning"):
            ppo.update(batch)
        with run.timed("publishing"):
            publish(ppo.agent.policy.state_dict())
        if run.add_rewards(reward, done, frames=frames):
            return run


def _process(task: Task, start: Callable[[], Run], kind: str) -> Run:
    from cormorant import make_collector

    with make_collector(_job(task)) as collector:
        ppo, versions = _make_ppo(task, *collector.spaces), iter(range(1, task.max_frames))

        def publish(weights: Tensors) -> None:
            collector.weights.offer({"policy": {k: v.clone() for k, v in weights.items()}}, version=next(versions))

        publish(ppo.agent.policy.state_dict())
        return _until_reached(ppo, start(), lambda: collector.collect(num_steps=task.frames_per_update), publish)


def _workers(task: Task, start: Callable[[], Run], kind: str) -> Run:
    from cormorant import open_fleet

    staleness = 0 if kind == "on-policy" else 1
    with open_fleet(_job(task, workers=2, max_staleness=staleness), workers=2) as fleet:
        ppo = _make_ppo(task, *fleet.spaces)
        fleet.publish(ppo.agent.policy.state_dict()).wait(60)
        return _until_reached(ppo, start(), fleet.next_batch, fleet.publish)


def _job(task: Task, *, workers: int = 1, max_staleness: int = 0) -> dict[str, Any]:
    num_envs, num_threads = task.share(workers), task.env_threads(workers)
    return {
        "apiVersion": "cormorant.dev/v1alpha1",
        "kind": "CollectorJob",
        "metadata": {"name": "train"},
        "spec": {
            "env": {"envpool": {"taskId": task.task_id, "numEnvs": num_envs, "numThreads": num_threads}},
            "policy": {
                "entrypoint": f"cormorant.policies:{task.policy}",
                "kwargs": {"return_log_prob": max_staleness > 0},
            },
            "collection": {
                "mode": "sync",
                "framesPerBatch": num_envs * task.steps_per_batch,
                "seed": torch.initial_seed(),
                "weights": {"maxStaleness": max_staleness},
            },
            "output": {"queue": {"capacityBatches": 1}},
        },
    }


def _loop(task: Task, start: Callable[[], Run], kind: str) -> Run:
    import envpool

    env = envpool.make(
        task.task_id,
        env_type="gymnasium",
        num_envs=task.num_envs,
        num_threads=task.env_threads(1),
        seed=torch.initial_seed(),
    )
    ppo = _make_ppo(task, env.observation_space, env.action_space)
    policy = ppo.agent.policy
    obs_B, _ = env.reset()
    obs_B, ended_B = torch.from_numpy(obs_B), torch.zeros(task.num_envs, dtype=torch.bool)

    def take() -> TensorDict:
        nonlocal obs_B, ended_B
        steps: list[TensorDict] = []
        for _ in range(task.steps_per_batch):
            with torch.inference_mode():
                action_B = policy(obs_B)
            new, reward, terminated, truncated, _ = env.step(action_B.numpy())
            terminated_B, next_obs_B = torch.from_numpy(terminated), torch.from_numpy(new)
            done_B = terminated_B | torch.from_numpy(truncated)
            following = {
                "observation": next_obs_B,
                "reward": torch.from_numpy(reward) * ~ended_B,
                "terminated": terminated_B,
                "done": done_B,
            }
            # EnvPool ignores the action after an end and answers with the first observation: no experience.
            frame = {"observation": obs_B, "action": action_B.clone(), "next": following}
            steps.append(TensorDict(frame | {"collector": {"mask": ~ended_B}}, batch_size=[task.num_envs]))
            obs_B, ended_B = next_obs_B, done_B
        return torch.stack(steps, dim=1)

    try:
        return _until_reached(ppo, start(), take)
    finally:
        env.close()


if __name__ == "__main__":
    main(learn, "process", "on-policy", "behind", "loop")
