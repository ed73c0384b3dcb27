"""The Tianshou layer over EnvPools that the script made."""

import envpool
import gymnasium
import pytest
import torch

from cormorant.policies import mlp
from cormorant_compat.tianshou import AsyncCollector, Collector, LatestBatch
from cormorant_worker.errors import EnvError

BOX, TWO = gymnasium.spaces.Box(-5, 5, (4,)), gymnasium.spaces.Discrete(2)


def pool(num_envs: int, batch_size: int = 0) -> object:
    sizes = {"num_envs": num_envs, "batch_size": batch_size or num_envs}
    return envpool.make("CartPole-v1", "gymnasium", **sizes, num_threads=2, seed=3)


def check(batch: object) -> None:
    """What every CartPole batch must show: no phantom, no gap, true ends."""
    mask = batch["collector", "mask"] if ("collector", "mask") in batch.keys(True) else torch.ones(batch.shape) > 0
    done = batch["next", "done"].squeeze(-1)
    assert (batch["next", "reward"].squeeze(-1)[mask] == 1).all()
    goes_on = mask[:, 1:] & ~done[:, :-1]
    assert torch.equal(batch["observation"][:, 1:][goes_on], batch["next", "observation"][:, :-1][goes_on])
    begins = mask[:, 1:] & done[:, :-1]
    assert (batch["observation"][:, 1:][begins].abs() <= 0.05).all()
    ids = batch["collector", "traj_ids"]
    assert torch.equal(ids[:, 1:][goes_on], ids[:, :-1][goes_on])
    assert (ids[:, 1:][begins] != ids[:, :-1][begins]).all()


@pytest.mark.parametrize("batch_size", [0, 3])
def test_counts_and_frames_are_exact_and_a_reset_begins_anew(batch_size: int) -> None:
    kind = AsyncCollector if batch_size else Collector
    buffer = LatestBatch()
    collector = kind(mlp(BOX, TWO), pool(12, batch_size), buffer)
    for size in (100, 7, 240):
        assert collector.collect(n_step=size).n_collected_steps == len(buffer) == size
        check(buffer.tensordict)
    for count in (12, 31):
        stats = collector.collect(n_episode=count)
        assert stats.n_collected_episodes == len(stats.lens) == count
        assert stats.n_collected_steps == len(buffer) == stats.lens.sum() == stats.returns.sum()
        check(buffer.tensordict)
        assert (buffer.tensordict["observation"][:, 0].abs() <= 0.05).all()
        shares = buffer.tensordict["next", "done"].squeeze(-1).sum(1)
        assert shares.tolist() == [count // 12 + (b < count % 12) for b in range(12)]
    for _ in range(5):
        collector.collect(n_step=57)
        check(buffer.tensordict)
        collector.reset_env()
        collector.collect(n_step=24)
        check(buffer.tensordict)
        first = buffer.tensordict["observation"][:, 0]
        assert (first.abs() <= 0.05).all()
        assert len(first.unique(dim=0)) == 12


def test_wrong_collector_and_arguments_for_pools_are_refused() -> None:
    with pytest.raises(EnvError, match="come back 3 at a time of 12; use AsyncCollector"):
        Collector(mlp(BOX, TWO), pool(12, 3))
    collector = Collector(mlp(BOX, TWO), pool(4))
    with pytest.raises(EnvError, match=r"gym_reset_kwargs has \['seed'\], and EnvPoolVectorEnv takes no arguments"):
        collector.collect(n_step=4, reset_before_collect=True, gym_reset_kwargs={"seed": 3})
    with pytest.raises(EnvError, match="EnvPoolVectorEnv cannot be rendered"):
        collector.collect(n_step=4, render=0.1)
    assert collector.collect(n_step=4, render=0.0).n_collected_steps == 4
    with pytest.raises(EnvError, match="batch_size 5 does not divide num_envs 12"):
        AsyncCollector(mlp(BOX, TWO), pool(12, 5))
