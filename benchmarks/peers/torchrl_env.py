"""EnvPool under TorchRL 0.14.1, and the policies its collectors run. Each factory runs inside the worker.

TorchRL's EnvPool wrapper asks for the backend "gym" while it converts the spaces. EnvPool 1.2.5 hands out gymnasium
spaces, so the wrapper as released stops in its constructor. `gymnasium_backend` answers the request for "gym" with
"gymnasium" for as long as the constructor runs; nothing else of TorchRL is changed. Steps that EnvPool ignores (after
an end of an episode) come out of this wrapper as data; `valid_frames` does not count them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import envpool
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical, Normal
from torchrl.envs import MultiThreadedEnvWrapper
from torchrl.envs.libs import gym as torchrl_gym
from torchrl.modules import ProbabilisticActor

from benchmarks.networks import Sampler, build_network
from benchmarks.workloads import Workload


@contextmanager
def gymnasium_backend() -> Iterator[None]:
    """Make TorchRL's converter use gymnasium where it asks for gym."""
    released = torchrl_gym.set_gym_backend

    def set_backend(name: str) -> object:
        return released("gymnasium" if name == "gym" else name)

    with mock.patch.object(torchrl_gym, "set_gym_backend", set_backend):
        yield


def make_env(workload: Workload, *, num_envs: int, num_threads: int, seed: int) -> MultiThreadedEnvWrapper:
    torch.set_num_threads(1)
    pool = envpool.make(workload.task_id, env_type="gymnasium", num_envs=num_envs, num_threads=num_threads, seed=seed)
    with gymnasium_backend():
        return MultiThreadedEnvWrapper(pool)


def make_policy(workload: Workload, kind: str) -> TensorDictModule:
    """The benchmark's network as a TensorDictModule.

    "module" samples in one module, "actor" is TorchRL's ProbabilisticActor, which also writes logits or loc and scale.
    """
    torch.set_num_threads(1)
    example = envpool.make(workload.task_id, env_type="gymnasium", num_envs=1)
    network = build_network(workload, example.observation_space, example.action_space)
    if kind == "module":
        return TensorDictModule(Sampler(network), in_keys=["observation"], out_keys=["action"])
    parameters = ["logits"] if network.is_discrete else ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=parameters),
        in_keys=parameters,
        distribution_class=Categorical if network.is_discrete else Normal,
    )


def valid_frames(batch: TensorDictBase) -> int:
    """Frames of a batch without those whose action EnvPool dropped: one after each end of an episode."""
    return batch.numel() - int(batch["next", "done"].sum())
