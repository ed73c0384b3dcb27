"""CartPole in torch: thousands of copies step as one tensor, on the CPU or on a CUDA device.

    python examples/torch_cartpole.py [--num-envs 4096] [--device cuda]

The environment returns tensors. Batches are played on their device, if the policy is there, and copied once.
"""

import argparse
import math
from functools import partial
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from cormorant import open_fleet
from cormorant.policies import mlp

MOST_STEPS = 500
"""The longest episode; it is truncated there."""


class TorchCartPole(gymnasium.vector.VectorEnv):
    """The equations of gymnasium's CartPole-v1 (Barto, Sutton and Anderson, 1983) for `num_envs` rows at once."""

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        # A row that ended begins its next episode in the same step; `final_obs` has what the old one ended with.
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.random = torch.Generator(self.device)
        self.state, self.steps = self.first(), torch.zeros(num_envs, device=self.device)

    def first(self) -> Tensor:
        """[N, 4] where episodes begin."""
        return torch.rand(self.num_envs, 4, generator=self.random, device=self.device) * 0.1 - 0.05

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Tensor, dict]:
        if seed is not None:
            self.random.manual_seed(seed)
        self.state, self.steps = self.first(), torch.zeros_like(self.steps)
        return self.state, {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
        x, speed, angle, turn = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = (actions * 20.0 - 10.0 + 0.05 * turn**2 * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        slide = push - 0.05 * bend * cos / 1.1
        last = torch.stack((x + 0.02 * speed, speed + 0.02 * slide, angle + 0.02 * turn, turn + 0.02 * bend), 1)
        self.steps = self.steps + 1
        terminated = (last[:, 0].abs() > 2.4) | (last[:, 2].abs() > math.radians(12))
        truncated = self.steps >= MOST_STEPS
        over = terminated | truncated
        self.state = torch.where(over[:, None], self.first(), last)
        self.steps = torch.where(over, 0.0, self.steps)
        return self.state, torch.ones_like(self.steps), terminated, truncated, {"final_obs": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=3)
    args = parser.parse_args()
    with open_fleet(
        env=partial(TorchCartPole, device=args.device),
        num_envs=args.num_envs,
        policy_factory=mlp,
        device=args.device,
        workers=1,
        frames_per_batch=32 * args.num_envs,
    ) as fleet:
        for batch in islice(fleet.batches(), args.batches):
            done = batch["next", "done"].squeeze(-1)
            print(f"{batch.numel():,} frames, {int(done.sum()):,} episodes ended", tuple(batch.shape))


if __name__ == "__main__":
    main()
