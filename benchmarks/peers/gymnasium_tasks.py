"""The workloads' tasks as gymnasium has them, for peers that do not step EnvPool.

EnvPool's Pong-v5 is the Atari task after DeepMind's preprocessing: 84x84 grayscale, action repeat 4, up to 30 no-ops,
four stacked planes. HalfCheetah-v5 steps the same MuJoCo model as EnvPool's v4.
"""

import ale_py
import gymnasium

from benchmarks.workloads import Workload

gymnasium.register_envs(ale_py)
_IDS = {"CartPole-v1": "CartPole-v1", "HalfCheetah-v4": "HalfCheetah-v5"}


def make_env(workload: Workload) -> gymnasium.Env:
    if workload.task_id in _IDS:
        return gymnasium.make(_IDS[workload.task_id])
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84, grayscale_obs=True)
    return gymnasium.wrappers.FrameStackObservation(env, 4)
