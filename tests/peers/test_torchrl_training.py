"""TorchRL's own losses and buffers train on our collectors, as in its examples.

`make test-peers` makes the environment that has it; elsewhere these tests are skipped.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs these tests")

from cormorant_compat.torchrl import sync_sync_collector

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]


def cartpole() -> Callable[[], Any]:
    """A maker of 8 CartPoles that travels by value: workers cannot import this module."""

    def make() -> Any:
        from cormorant_compat.torchrl import MultiThreadedEnv

        return MultiThreadedEnv(8, "CartPole-v1", categorical_action_encoding=True)

    return make


def mean_length(batches: list[Any]) -> float:
    """Frames an episode, over all that ended."""
    frames = sum(batch.numel() for batch in batches)
    return frames / max(1, sum(int(batch["next", "done"].sum()) for batch in batches))


def test_ppo_learns_cartpole() -> None:
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
    from torch.distributions import Categorical
    from torchrl.modules import ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(network, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True, log_prob_key="sample_log_prob"
        ),
    )
    critic = ValueOperator(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)), in_keys=["observation"])
    loss_of = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    loss_of.set_keys(sample_log_prob="sample_log_prob")
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=3e-3)
    batches: list[Any] = []
    with sync_sync_collector(
        cartpole(), None, 1, 1, policy=actor, frames_per_batch=1024, total_frames=30 * 1024
    ) as collector:
        for n, batch in enumerate(collector):
            assert batch is not None
            assert (batch["collector", "policy_version"] == n).all()
            batches.append(batch.clone())
            for _ in range(8):
                with torch.no_grad():
                    advantage(batch)
                frames = batch.reshape(-1)
                for part in frames[torch.randperm(len(frames))].split(256):
                    losses = loss_of(part)
                    loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            collector.update_policy_weights_(actor)
    assert mean_length(batches[:3]) < 40
    assert mean_length(batches[-3:]) > 80
