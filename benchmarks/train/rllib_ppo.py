"""RLlib's PPO: two remote EnvRunners with half of the environments each, and a local learner (new API stack)."""

from collections.abc import Callable

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
)
from ray.tune.registry import register_env

from benchmarks.peers.gymnasium_tasks import make_env
from benchmarks.train.task import Run, Task, main


def learn(task: Task, start: Callable[[], Run], kind: str) -> Run:
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    register_env("task", lambda _: make_env(task))
    algorithm = (
        PPOConfig()
        .environment("task", normalize_actions=False, clip_actions=False)  # as the others
        .env_runners(
            num_env_runners=2, num_envs_per_env_runner=task.share(2), rollout_fragment_length=task.steps_per_batch
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=task.frames_per_update,
            minibatch_size=task.minibatch,
            num_epochs=task.epochs,
            gamma=task.gamma,
            lambda_=task.lambda_,
            clip_param=task.clip,
            lr=task.learning_rate,
            entropy_coeff=task.entropy_bonus,
            grad_clip=task.max_grad_norm,
            vf_loss_coeff=0.5,
            vf_clip_param=float("inf"),  # ours is not clipped either
            use_kl_loss=False,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[64, 64],
                fcnet_activation="tanh",
                vf_share_layers=False,
                free_log_std=task.name == "halfcheetah",  # RLlib refuses it where actions are discrete
            )
        )
        .reporting(metrics_num_episodes_for_smoothing=task.episodes)
        .debugging(log_level="ERROR", seed=torch.initial_seed())
        .build_algo()
    )
    run = start()
    while True:
        sampled = algorithm.train()[ENV_RUNNER_RESULTS]
        # RLlib keeps the window of the last episodes itself.
        is_full = sampled.get(NUM_EPISODES_LIFETIME, 0) >= task.episodes
        window = [sampled[EPISODE_RETURN_MEAN]] * task.episodes if is_full else []
        if run.add(window, frames=int(sampled[NUM_ENV_STEPS_SAMPLED_LIFETIME]) - run.frames):
            break
    algorithm.stop()
    ray.shutdown()
    return run


if __name__ == "__main__":
    main(learn)
