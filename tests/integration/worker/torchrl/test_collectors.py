"""TorchRL's collector helpers over real workers, value by value."""

import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from cormorant_compat.torchrl import (
    Collector,
    OffPolicyCollectorConfig,
    make_collector_offpolicy,
    make_collector_onpolicy,
    sync_async_collector,
    sync_sync_collector,
)
from cormorant_compat.torchrl.plan import next_seed
from cormorant_testing.check import Checker
from cormorant_testing.envs import CountingEnv
from cormorant_testing.policies import Versioned, numbered
from cormorant_worker.errors import WeightsMismatch, WorkerFailed

needs_torchrl = pytest.mark.skipif(find_spec("torchrl") is None, reason="TorchRL is not installed")

make: Callable[..., CountingEnv] = CountingEnv
INLINE = {"vectorization": "inline"}


def rows(batch: Any) -> Any:
    """[W, B, T] as the Checker takes it."""
    flat = batch.reshape(-1, batch.shape[-1])
    flat.names = [None, "time"]
    return flat


def test_sync_collector_frames_once_in_order_with_new_weights() -> None:
    checker = Checker(job_seed=0, num_envs=2, options={"lengths": (3, 4)}, action="box", acts_by_version=True)
    policy = Versioned()
    with sync_sync_collector(
        [make] * 4, {"lengths": (3, 4), "action": "box"}, num_collectors=2, policy=policy, frames_per_batch=20,
        total_frames=70, **INLINE,
    ) as collector:  # fmt: skip
        assert len(collector) == 4
        shapes = []
        for n, batch in enumerate(collector):
            assert batch.names == [None, None, "time"]
            assert batch.view(-1).shape == (batch.numel(),)
            assert (batch["collector", "policy_version"] == n).all()
            shapes.append(tuple(batch.shape))
            checker.take(rows(batch))
            stats = collector.stats()
            assert (stats["workers"], stats["completed"]) == (2, n == 3)
            if n == 2:  # none has ended yet
                assert stats["worker_1/frames"] == 30
            with torch.no_grad():
                policy.number.fill_(n + 1)
            collector.update_policy_weights_([None, policy][n % 2], **({} if n % 2 else {"weights": numbered(n + 1)}))
        # 70 are no whole steps of 4 environments.
        assert shapes == [(2, 2, 5), (2, 2, 5), (2, 2, 5), (2, 2, 3)]
        assert checker.frames == 72
        assert (stats["frames"], stats["batches"]) == (72, 4)
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            (policy, {"weights": numbered(3)}, "weights were given more than once"),
            (None, {"worker_ids": 7}, "worker_ids 7 is not a collector"),
            (None, {"worker_ids": []}, r"worker_ids \[\] is not a collector, or several: there are \[0, 1\]"),
        ]
        for weights, given, words in wrong:
            with pytest.raises(ValueError, match=words):
                collector.update_policy_weights_(weights, **given)
        with pytest.raises(WeightsMismatch):
            collector.update_policy_weights_(weights_dict={"policy": numbered(9), "critic": numbered(9)})
        assert collector.stats()["policy_version"] == 4
    collector.shutdown()


@pytest.mark.slow
def test_environments_may_differ_and_unit_dimensions_go() -> None:
    env_kwargs = [{"lengths": 2}, {"lengths": 5}]
    with sync_sync_collector(make, env_kwargs, 1, 2, frames_per_batch=20, total_frames=40) as collector:
        found = torch.cat(list(collector), dim=1)
    assert found.shape == (2, 20)
    done = found["next", "done"].squeeze(-1)
    assert [row.nonzero().flatten().tolist() for row in done] == [list(range(1, 20, 2)), list(range(4, 20, 5))]
    with sync_sync_collector([make], None, num_collectors=1, frames_per_batch=7, total_frames=7) as collector:
        (batch,) = list(collector)
    assert (batch.shape, batch.names) == ((7,), ["time"])


def test_the_length_is_the_number_of_batches_that_come() -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 160, **INLINE}
    with sync_async_collector(make, None, 8, 1, **arguments) as collector:
        assert len(collector) == 10
        assert [batch.numel() for batch in collector] == [16] * 10
    with sync_sync_collector(make, None, 3, 2, **arguments) as collector:
        assert len(collector) == len(list(collector)) == 14


@pytest.mark.slow
def test_limits_resets_and_random_frames_are_as_asked() -> None:
    checker = Checker(job_seed=0, num_envs=2, options={"lengths": 50}, action="box", max_frames=4, resets=True)
    with sync_sync_collector(
        make, {"lengths": 50, "action": "box"}, 2, 2, policy=Versioned(), frames_per_batch=24, total_frames=96,
        max_frames_per_traj=4, reset_at_each_iter=True, init_random_frames=30, **INLINE,
    ) as collector:  # fmt: skip
        batches = list(collector)
    for batch in batches:
        checker.take(rows(batch))
    random = torch.cat([batch["collector", "policy_version"] for batch in batches], dim=-1) == -1
    # 15 frames of each collector, 2 at a time.
    assert random.sum(-1).tolist() == [[8, 7], [8, 7]]
    assert random[..., :7].all()


@pytest.mark.parametrize("vectorization", ["inline", pytest.param("subprocess", marks=pytest.mark.slow)])
def test_seed_rules_numpys_and_pythons_generators(vectorization: str) -> None:
    class Drawing(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float64)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.step(None)[0], {}

        def step(self, action: Any) -> Any:
            return np.array([np.random.rand(), random.random()]), 0.0, False, False, {}

    with sync_sync_collector(Drawing, None, 2, 2, frames_per_batch=12, vectorization=vectorization) as collector:
        as_made, found = collector.next(), []
        for seed in (0, 5, 5):
            assert collector.set_seed(seed) == next_seed(seed, 4)
            found.append(collector.next()["observation"])
    assert torch.equal(found[0], as_made["observation"])
    assert torch.equal(found[1], found[2])
    # Every environment, step and seed has numbers of its own.
    assert len(torch.cat([found[0], found[1]]).flatten().unique()) == 2 * found[0].numel()


@pytest.mark.slow
def test_config_helpers_split_round_up_and_keep_the_config() -> None:
    cfg = OffPolicyCollectorConfig(
        num_workers=3, env_per_collector=2, frames_per_batch=24, total_frames=48, init_random_frames=10,
        multi_step=True, n_steps_return=2, gamma=0.5,
    )  # fmt: skip
    with make_collector_offpolicy(make, None, cfg, {"lengths": 3}) as collector:
        assert collector.stats()["workers"] == 2
        batch = collector.next()
        assert batch.shape == (8, 3)
        assert batch["collector", "mask"].all()
        # Rewards are 1, 2, 3 (and a thousandth an episode): two steps ahead, and no further than the end.
        summed = torch.tensor([[1 + 2 / 2, 2 + 3 / 2, 3.0]] * 8)
        torch.testing.assert_close(batch["next", "reward"].squeeze(-1), summed, atol=0.01, rtol=0)
    assert cfg.collector_device == ["cpu"]
    with make_collector_onpolicy(make, None, cfg, {"lengths": 3}) as collector:
        assert len(collector) == 2
        batch = collector.next()
        assert "original_reward" not in batch["next"].keys()  # noqa: SIM118  # a TensorDict, not a dict
        assert batch["collector", "mask"].sum() == 24


@pytest.mark.slow
def test_config_helpers_follow_async_and_seed() -> None:
    def first(seed: int) -> TensorDict:
        cfg = OffPolicyCollectorConfig(
            num_workers=1, env_per_collector=1, frames_per_batch=12, total_frames=24, init_random_frames=12,
            async_collection=True, exploration_type="mode", seed=seed,
        )  # fmt: skip
        with make_collector_offpolicy(make, Versioned(), cfg, {"lengths": 3, "action": "box"}) as collector:
            spec = collector.fleet.job.spec
            assert (spec.collection.mode, spec.policy.exploration_type) == ("async", "mode")
            batches = list(collector)
        assert [int(batch["collector", "mask"].sum()) for batch in batches] == [12, 12]
        assert [set(batch["collector", "policy_version"].flatten().tolist()) for batch in batches] == [{-1}, {0}]
        return batches[0]

    one, again, another = first(5), first(5), first(6)
    assert torch.equal(one["observation"], again["observation"])
    assert not torch.equal(one["observation"], another["observation"])


@pytest.mark.gpu
@pytest.mark.slow
def test_batches_are_pinned_where_there_is_a_device() -> None:
    with sync_sync_collector(make, None, 1, 1, frames_per_batch=8, total_frames=8, pin_memory=True) as collector:
        (batch,) = list(collector)
    assert batch["observation"].is_pinned()


def serial_envs() -> Any:
    from torchrl.envs import GymEnv, SerialEnv

    return SerialEnv(3, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))


def pool() -> Any:
    from cormorant_compat.torchrl import MultiThreadedEnv

    return MultiThreadedEnv(3, "CartPole-v1", categorical_action_encoding=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("maker", [pool, pytest.param(serial_envs, marks=[pytest.mark.slow, needs_torchrl])])
def test_a_batched_environment_fills_a_collector(maker: Any) -> None:
    with sync_async_collector(maker, None, 1, 1, frames_per_batch=100, total_frames=200) as collector:
        batches: list[TensorDict] = list(collector)  # type: ignore[arg-type]
    # 100 are no whole steps of 3 environments.
    assert [tuple(batch.shape) for batch in batches] == [(3, 34), (3, 33)]
    whole = torch.cat(batches, dim=1)
    done = whole["next", "done"].squeeze(-1)
    assert done.sum() > 3
    ids = whole["collector", "traj_ids"]
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    assert (whole["observation"][:, 1:][done[:, :-1]].abs() <= 0.05).all()


@pytest.mark.slow
@needs_torchrl
@pytest.mark.filterwarnings("ignore")
def test_torchrls_environments_step_on_their_device_and_read_info() -> None:
    def nowhere() -> Any:
        from torchrl.data import Unbounded
        from torchrl.envs import GymWrapper
        from torchrl.envs.libs.gym import default_info_dict_reader

        reader = default_info_dict_reader(["pair"], spec={"pair": Unbounded((2,), dtype=torch.int16)})
        return GymWrapper(CountingEnv(), device=None).set_info_dict_reader(reader)

    for given, expected in (({}, None), ({"env_device": ["cpu"]}, torch.device("cpu"))):
        with Collector(nowhere, frames_per_batch=20, total_frames=20, **given) as collector:
            batch = collector.next()
            assert torch.equal(batch["next", "pair"], batch["next", "observation"][..., 1:3].short())
            assert collector.env.device == expected


@pytest.mark.parametrize("how", ["inline", pytest.param("subprocess", marks=pytest.mark.slow)])
def test_what_an_environment_raises_ends_the_collecting_at_once(how: Any) -> None:
    env_kwargs = {"failures": [{"how": "raise", "step": 3}]}
    with sync_sync_collector(make, env_kwargs, 2, 1, frames_per_batch=20, vectorization=how) as collector:
        # Both fail at the same step; of two processes either may be heard first.
        with pytest.raises(RuntimeError, match=r"environment [01] raised ValueError: told to fail") as raised:
            next(iter(collector))
        assert isinstance(raised.value, WorkerFailed)
        notes = getattr(raised.value, "__notes__", [])  # Python prints them with an error that nobody catches
        assert "Traceback (most recent call last)" in "\n".join([str(raised.value), *notes])
        assert collector.stats()["restarts"] == 0


class Fixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.number.expand(len(observation)).long()


def test_a_published_action_outside_the_space_ends_the_collecting_at_once() -> None:
    with sync_sync_collector(make, policy=Fixed(), frames_per_batch=20) as collector:
        collector.next()
        collector.update_policy_weights_({"number": torch.tensor(99.0)})
        with pytest.raises(WorkerFailed, match=r"action for environment 0 is 99 .* outside Discrete"):
            collector.next()
        assert collector.stats()["restarts"] == 0
