"""What is learned, with which constants, and when a run has reached its goal. Imported by every contender."""

import argparse
import json
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.protocol import cpu_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """CartPole with the constants of examples/ppo.py, under the same names."""

    id: str = "CartPole-v1"
    num_envs: int = 16
    steps: int = 32
    gamma: float = 0.98
    lambda_: float = 0.9
    clip: float = 0.2
    epochs: int = 10
    minibatch: int = 128
    learning_rate: float = 1e-3
    entropy_bonus: float = 0.005
    max_grad_norm: float = 0.5
    episodes: int = 50
    """The return is the mean of so many last episodes."""
    max_frames: int = 1_000_000

    @property
    def frames_per_update(self) -> int:
        return self.num_envs * self.steps


class Run:
    """One run's clock and score. The clock starts when the first frames are asked for."""

    def __init__(self, task: Task, goal: float) -> None:
        self.task, self.goal = task, goal
        self.returns: deque[float] = deque(maxlen=task.episodes)
        self.frames = 0
        self._running = torch.zeros(task.num_envs)
        self._began = time.perf_counter()
        self._ended = self._cpu_s = 0.0

    def add(self, returns: Iterable[float], *, frames: int) -> bool:
        """Note episodes that ended. True when it is over."""
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
        return len(self.returns) == self.task.episodes and statistics.mean(self.returns) >= self.goal

    def say(self) -> None:
        """Print the result for `__main__.py`."""
        result = {
            "is_reached": self.is_reached,
            "frames": self.frames,
            "seconds": self._ended - self._began,
            "cpu_seconds": self._cpu_s,
            "return": statistics.mean(self.returns) if self.returns else None,
        }
        print(json.dumps(result), flush=True)


def main(learn: Callable[[Task, Callable[[], Run], str], Run], *kinds: str) -> None:
    """Run a contender's script once. `learn` gets the task, what starts the clock, and which kind is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=kinds or ("",), default=(kinds or ("",))[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--goal", type=float, default=450.0)
    parser.add_argument("--max-frames", type=int, default=Task().max_frames)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)  # networks this small are slower on several threads
    task = Task(max_frames=chosen.max_frames)
    learn(task, lambda: Run(task, chosen.goal), chosen.kind).say()
