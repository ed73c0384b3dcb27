"""What is learned, with which constants, and when a run is over. Imported by every contender."""

import argparse
import json
import math
import resource
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.protocol import cpu_seconds
from benchmarks.workloads import Workload, num_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Workload):
    """A workload and the constants of PPO, under the names of examples/ppo.py."""

    goal: float = math.inf
    """A run ends with the update after which the mean of the last `episodes` returns was this."""
    max_frames: int
    """A run ends with the update that learned from the last of so many frames."""
    episodes: int
    gamma: float = 0.99
    lambda_: float = 0.95
    clip: float = 0.2
    epochs: int
    minibatch: int
    learning_rate: float
    entropy_bonus: float
    max_grad_norm: float = 0.5

    @property
    def frames_per_update(self) -> int:
        return self.num_envs * self.steps_per_batch

    @property
    def torch_threads(self) -> int:
        """Threads of the learning process; a network as small as the MLP is slower on several."""
        return num_cores() if self.policy == "atari_cnn" else 1

    def env_threads(self, workers: int) -> int:
        """EnvPool's threads in one of `workers` processes; environments as cheap as CartPole are slower on several."""
        return 1 if self.task_id == "CartPole-v1" else max(1, num_cores() // workers)


TASKS = {
    task.name: task
    for task in (
        # Constants of examples/ppo.py.
        Task(
            name="cartpole", task_id="CartPole-v1", policy="mlp", num_envs=16, steps_per_batch=32,
            goal=450.0, max_frames=1_000_000, episodes=50,
            gamma=0.98, lambda_=0.9, epochs=10, minibatch=128, learning_rate=1e-3, entropy_bonus=0.005,
        ),
        # Constants of examples/rest_ppo_halfcheetah.py; nothing is normalized. 64 frames fewer than 20 updates, because
        # EnvPool's late resets are not counted: a loop over it would need another update.
        Task(
            name="halfcheetah", task_id="HalfCheetah-v4", policy="mlp", num_envs=16, steps_per_batch=128,
            max_frames=20 * 2048 - 64, episodes=16, epochs=10, minibatch=64, learning_rate=3e-4, entropy_bonus=0.0,
        ),
        # Constants of examples/rest_ppo_pong.py with 8 environments, or no episode would end in so few frames.
        Task(
            name="pong", task_id="Pong-v5", policy="atari_cnn", num_envs=8, steps_per_batch=128,
            max_frames=10 * 1024 - 64, episodes=8, clip=0.1, epochs=3, minibatch=256, learning_rate=2.5e-4,
            entropy_bonus=0.01,
        ),
    )
}  # fmt: skip


class Run:
    """One run's clock and score. The clock starts when the first frames are asked for."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.returns: deque[float] = deque(maxlen=task.episodes)
        self.frames = self.gradient_steps = 0
        self._running = torch.zeros(task.num_envs)
        self._began = time.perf_counter()
        self._ended = self._cpu_s = 0.0
        self.spent: Counter[str] = Counter()
        """Seconds by what the learner did, where its script says so."""
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.gradient_steps += 1

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the block's time to `spent`."""
        began = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - began

    def add(self, returns: Iterable[float], *, frames: int) -> bool:
        """Note the frames of an update and the episodes that ended in them. True when the run is over."""
        self.returns.extend(map(float, returns))
        self.frames += frames
        is_over = self.is_reached or self.frames >= self.task.max_frames
        if is_over and not self._ended:  # workers live yet, and their processor time can be read
            reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._ended, self._cpu_s = time.perf_counter(), cpu_seconds() + reaped.ru_utime + reaped.ru_stime
        return is_over

    def add_rewards(self, reward_BT: torch.Tensor, done_BT: torch.Tensor, *, frames: int) -> bool:
        """The same, from the rewards of a batch whose rows go on in the next one."""
        ended: list[float] = []
        for reward_B, done_B in zip(reward_BT.unbind(1), done_BT.unbind(1), strict=True):
            self._running += reward_B
            ended += self._running[done_B].tolist()
            self._running[done_B] = 0.0
        return self.add(ended, frames=frames)

    @property
    def is_reached(self) -> bool:
        return len(self.returns) == self.task.episodes and statistics.mean(self.returns) >= self.task.goal

    def say(self) -> None:
        """Print the result for `__main__.py`. An update is as many steps of the optimizer as it has to have."""
        per_update = self.task.epochs * math.ceil(self.task.frames_per_update / self.task.minibatch)
        result = {
            "is_reached": self.is_reached,
            "frames": self.frames,
            "gradient_steps": self.gradient_steps,
            "updates": self.gradient_steps / per_update,
            "seconds": self._ended - self._began,
            "cpu_seconds": self._cpu_s,
            "return": statistics.mean(self.returns) if self.returns else None,
            "spent": dict(self.spent),
        }
        print(json.dumps(result), flush=True)


class _Input(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(observation).float() * self.scale


def make_mlp(num_inputs: int, num_outputs: int, *, gain: float) -> nn.Sequential:
    """The layers of `cormorant.policies.mlp`, for peers whose own are not these."""
    layers = [nn.Linear(num_inputs, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return nn.Sequential(_Input(1.0), layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make_cnn() -> nn.Sequential:
    """Those of `cormorant.policies.atari_cnn` up to its 512 features."""
    return nn.Sequential(
        _Input(1 / 255), nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(), nn.Flatten(-3), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
    )  # fmt: skip


def main(learn: Callable[[Task, Callable[[], Run], str], Run], *kinds: str) -> None:
    """Run a contender's script once. `learn` gets the task, what starts the clock, and which kind is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="cartpole")
    parser.add_argument("--kind", choices=kinds or ("",), default=(kinds or ("",))[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-frames", type=int, default=0, help="0: the task's")
    chosen = parser.parse_args()
    task = TASKS[chosen.task]
    task = replace(task, max_frames=chosen.max_frames or task.max_frames)
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(task.torch_threads)
    learn(task, lambda: Run(task), chosen.kind).say()
