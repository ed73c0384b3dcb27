"""Stable-Baselines3's PPO with its own policies (two networks of 64x64, tanh; or the Nature CNN, which actor and critic
share) on DummyVecEnv or SubprocVecEnv.
"""

from collections.abc import Callable

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from benchmarks.peers.gymnasium_tasks import make_env
from benchmarks.train.task import Run, Task, main


class _UntilReached(BaseCallback):
    """Asks after each update; one vector step more is made before learning ends."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.returns, self.is_over = run, list[float](), False

    def _on_step(self) -> bool:
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return not self.is_over

    def _on_rollout_start(self) -> None:
        self.is_over = self.run.add(self.returns, frames=self.num_timesteps - self.run.frames)
        self.returns.clear()

    _on_training_end = _on_rollout_start


def _make_env(task: Task) -> gymnasium.Env:
    env = make_env(task)
    if isinstance(env.action_space, gymnasium.spaces.Box):  # so wide that it clips nothing, as the others
        shape = env.action_space.shape
        env = gymnasium.wrappers.TransformAction(env, lambda action: action, gymnasium.spaces.Box(-1e3, 1e3, shape))
    return env


def learn(task: Task, start: Callable[[], Run], kind: str) -> Run:
    vec_env = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind]
    seed = torch.initial_seed()
    envs = make_vec_env(lambda: _make_env(task), n_envs=task.num_envs, seed=seed, vec_env_cls=vec_env)
    model = PPO(
        "CnnPolicy" if task.policy == "atari_cnn" else "MlpPolicy",
        envs,
        n_steps=task.steps_per_batch,
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
