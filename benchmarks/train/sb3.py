"""Stable-Baselines3's PPO with its own MlpPolicy (two networks of 64x64, tanh) on DummyVecEnv or SubprocVecEnv."""

from collections.abc import Callable

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from benchmarks.train.task import Run, Task, main


class _UntilReached(BaseCallback):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.is_over = run, False

    def _on_step(self) -> bool:
        returns = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        self.is_over = self.run.add(returns, frames=len(self.locals["infos"]))
        return not self.is_over


def learn(task: Task, start: Callable[[], Run], kind: str) -> Run:
    vec_env = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind]
    seed = torch.initial_seed()
    envs = make_vec_env(task.id, n_envs=task.num_envs, seed=seed, vec_env_cls=vec_env)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=task.steps,
        batch_size=task.minibatch,
        n_epochs=task.epochs,
        gamma=task.gamma,
        gae_lambda=task.lambda_,
        clip_range=task.clip,
        learning_rate=task.learning_rate,
        ent_coef=task.entropy_bonus,
        max_grad_norm=task.max_grad_norm,
        seed=seed,
        device="cpu",
    )
    run = start()
    model.learn(task.max_frames, callback=_UntilReached(run))
    envs.close()
    return run


if __name__ == "__main__":
    main(learn, "dummy", "subproc")
