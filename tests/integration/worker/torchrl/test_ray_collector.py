"""RayCollector over real actors, value by value."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from cormorant_compat.torchrl import RayCollector
from cormorant_testing.check import Checker
from cormorant_testing.envs import CountingEnv
from cormorant_testing.frame_loop import attempt_of
from cormorant_testing.policies import Versioned, constant, numbered
from cormorant_testing.scripts import run_script, until
from cormorant_worker.errors import StateError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

COUNTING = {"lengths": (3, 4), "action": "box"}
FREE: dict[str, Any] = {"remote_configs": {"num_cpus": 0}, "vectorization": "inline"}
"""The tests' cluster has no CPUs to ask for."""


def collectors_of(batch: Any) -> set[int]:
    return {attempt_of(int(number))[1] for number in batch["collector", "traj_ids"].unique()}


def versions_of(batches: list[Any], collector: int) -> list[int]:
    found = [batch["collector", "policy_version"] for batch in batches if collectors_of(batch) == {collector}]
    return torch.cat([one.flatten() for one in found]).tolist() if found else []


class Scheme:
    """Receives what a parent sent."""

    context: Any = None

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.calls: list[str] = []

    def init_on_receiver(self, *, model_id: str, context: Any) -> None:
        self.calls.append(f"init {model_id} of {type(context).__name__}")
        assert getattr(context, "worker_idx", None) is None
        self.context = context

    def connect(self) -> None:
        self.calls.append("connect")

    def receive(self) -> Any:
        found = self.inbox.pop(0) if self.inbox else None
        if isinstance(found, nn.Module):
            # As TorchRL's schemes do.
            self.context.update_policy_weights_(model_id="policy", policy_or_weights=found)
        return found


def test_endless_collectors_survive_deaths_and_grow() -> None:
    import ray

    policy = Versioned()
    checker = Checker(
        job_seed=0, num_envs=1, options={"lengths": (3, 4)}, action="box", acts_by_version=True, gaps=True
    )
    collector = RayCollector(
        [CountingEnv, CountingEnv], policy, frames_per_batch=20, create_env_kwargs=COUNTING, **FREE
    )
    with pytest.raises(RuntimeError, match="total_frames is -1"):
        len(collector)

    def take() -> Any:
        batch = collector.next()
        assert batch.shape == (20,)
        checker.take(batch.unsqueeze(0).refine_names(None, "time"))
        return batch

    def until_acts(version: int, *numbers: int) -> list[Any]:
        """Until the newest batch of each of these collectors has this version, and one more."""
        found: list[Any] = []
        while any(versions_of(found, number)[-1:] != [version] for number in numbers):
            found.append(take())
        return [*found, take()]

    until_acts(0, 0, 1)
    receipt = collector.update_policy_weights_(numbered(1), worker_ids=[1])
    assert {*receipt.applied, *receipt.waiting} == {"cpu-1"}
    with pytest.raises(ValueError, match="worker_ids 5 is not a collector"):
        collector.update_policy_weights_(numbered(2), worker_ids=5)
    batches = until_acts(1, 1) + until_acts(0, 0)
    assert set(versions_of(batches, 0)) == {0}

    scheme = Scheme()
    scheme.inbox = [numbered(2)]
    collector.register_scheme_receiver({"policy": scheme})
    assert scheme.calls == ["init policy of RayCollector", "connect"]
    until_acts(2, 0, 1)
    with pytest.raises(ValueError, match=r"come from registered schemes; call receive_weights\(\)"):
        collector.receive_weights(numbered(3))
    collector.receive_weights()
    assert collector.stats()["policy_version"] == 2
    assert collector.policy is policy
    module = Versioned()
    module.load_state_dict(numbered(3))
    scheme.inbox = [module]
    assert collector.cascade_execute("_receiver_schemes['policy'].receive") is module
    module.load_state_dict(numbered(4))
    scheme.inbox = [module]
    collector.receive_weights()
    # Once each: what the scheme published is not published again.
    assert collector.stats()["policy_version"] == 4

    assert len(collector.remote_collectors) == 2
    ray.kill(collector.remote_collectors[0])
    while (0, 0, 1) not in checker.attempts:
        take()
    until_acts(4, 0)
    assert collector.stats()["restarts"] == 1

    for num_envs, kwargs, words in (
        (3, {}, "num_envs 3"),
        (1, {"split_trajs": True}, "collector_kwargs have split_trajs, which all collectors have in common"),
        (1, {"policy_device": "gpu"}, "policy_device 'gpu' cannot be used here"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            collector.add_collectors([CountingEnv], num_envs, None, kwargs)
    assert collector.num_collectors == 2
    collector.add_collectors([lambda: CountingEnv(**COUNTING)], 1, None, {"max_frames_per_traj": 0}, {"num_cpus": 0})
    until_acts(4, 2)
    assert (collector.num_collectors, collector.stats()["workers_alive"]) == (3, 3)

    assert collector.cascade_execute("fleet.stats").version == 4
    with pytest.raises(RuntimeError, match="worker_idx has not been set"):
        _ = collector.worker_idx
    collector.worker_idx = 4
    assert collector.worker_idx == 4
    collector.init_updater(1)
    with pytest.raises(RuntimeError, match="give replay_buffer"):
        collector.start()
    with collector.pause():
        pass
    asyncio.run(collector.async_shutdown())
    collector.shutdown()
    assert ray.is_initialized()


def test_weights_are_pushed_after_batches_as_asked() -> None:
    policy = Versioned()
    with RayCollector(
        CountingEnv, policy, num_collectors=2, sync=True, frames_per_batch=40, total_frames=160,
        create_env_kwargs=COUNTING, num_workers_per_collector=2, update_after_each_batch=True, **FREE,
    ) as collector:  # fmt: skip
        checker = Checker(job_seed=0, num_envs=2, options={"lengths": (3, 4)}, action="box", acts_by_version=True)
        for n, batch in enumerate(collector):
            assert batch.shape == (2, 2, 10)
            assert (batch["collector", "policy_version"] == n).all()
            rows = batch.reshape(4, 10)
            rows.names = [None, "time"]
            checker.take(rows)
            with torch.no_grad():
                policy.number.fill_(n + 1)
        assert checker.frames == 160


def test_actors_extend_a_buffer_of_ray(tmp_path: Path) -> None:
    class RayReplayBuffer:
        stored = tmp_path / "stored"

        def extend(self, batch: Any) -> None:
            with self.stored.open("a") as file:
                file.write("".join(f"{row.tolist()}\n" for row in batch["observation"]))

    buffer = RayReplayBuffer()
    updater = Mock(spec=["register_collector", "init", "push_weights"])
    with RayCollector(
        CountingEnv, num_collectors=2, frames_per_batch=20, total_frames=200, replay_buffer=buffer,
        weight_updater=lambda: updater, policy=Versioned(),
        create_env_kwargs={"action": "box"}, **FREE,
    ) as collector:  # fmt: skip
        assert [collector.next() for _ in range(4)] == [None] * 4
        # Who joins stores, too.
        collector.add_collectors([lambda: CountingEnv(action="box")], None, None, None, {"num_cpus": 0})
        assert list(collector) == [None] * 6
        collector.update_policy_weights_(numbered(3), worker_ids=1)
        collector.init_updater(7)
        with pytest.raises(ValueError, match="model_id and weights_dict go nowhere with a weight_updater"):
            collector.update_policy_weights_(weights_dict={"policy": numbered(4)})
    stored = [json.loads(line) for line in buffer.stored.read_text().splitlines()]
    # [seed, episode, step, echo]: no frame twice, each environment's from its first on.
    keys = {tuple(frame[:3]) for frame in stored}
    assert len(stored) == len(keys) == 200
    updater.register_collector.assert_called_once_with(collector)
    updater.init.assert_called_once_with(7)
    assert updater.push_weights.call_args.kwargs["worker_ids"] == 1


def test_seeds_and_states_come_by_collector() -> None:
    kwargs: dict[str, Any] = {
        "num_collectors": 2, "sync": 1, "frames_per_batch": 12, "create_env_kwargs": COUNTING,
        "reset_at_each_iter": -False, "total_frames": 48,
    }  # fmt: skip
    with RayCollector(CountingEnv, Versioned(), **kwargs, **FREE) as collector:
        # The first two links of TorchRL's chain after 0, one for each collector's environment.
        assert collector.set_seed(0) == [795726461, 2841183792]
        assert collector.set_seed(3, static_seed=True) == [3, 3]
        collector.next()
        collector.update_policy_weights_(numbered(5))
        collector.next()
        state = collector.state_dict()
        expected = [collector.next() for _ in range(2)]
        assert collector.next() is None
        assert len(collector.state_dict()) == 2
    assert [(list(entry), entry["frames"], entry["iter"]) for entry in state] == [
        (["policy_state_dict", "frames", "iter", "fleet"], 24, 2)
    ] * 2
    with RayCollector(CountingEnv, Versioned(), **kwargs, **FREE) as collector:
        for wrong, words in (([*state, state[0]], "3 entries for 2 coll"), ({"frames": 0, "iter": 0}, "has no fleet")):
            with pytest.raises(StateError, match=words):
                collector.load_state_dict(wrong)
        collector.load_state_dict(state[0])  # one stands for all, as in TorchRL
        for batch in expected:
            again = collector.next()
            for key in ("observation", "action", ("collector", "policy_version")):
                assert torch.equal(again[key], batch[key])


def test_ray_is_shut_down_where_that_is_asked_for() -> None:
    # In a process of its own: the tests' cluster stays.
    script = """
import asyncio, ray
from cormorant_testing.envs import CountingEnv
from cormorant_compat.torchrl import RayCollector

for end in (lambda c: asyncio.run(c.async_shutdown(True)), lambda c: c.shutdown(5.0, True)):
    ray.init(address="local", num_cpus=0, include_dashboard=False, log_to_driver=False)
    collector = RayCollector(
        CountingEnv, frames_per_batch=4, remote_configs={"num_cpus": 0}, vectorization="inline"
    )
    assert collector.next().shape == (4,)
    collector.shutdown(5.0, False)
    assert ray.is_initialized()
    end(collector)
    assert not ray.is_initialized()
"""
    done = run_script(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("every", [1, 3])
def test_each_collector_gets_weights_after_batches_of_its_own(every: int) -> None:
    given: dict[str, Any] = {"update_after_each_batch": True} if every == 1 else {"max_weight_update_interval": every}
    policy, version = Versioned(), 0
    counts, given_to, acted = [0, 0], [{0}, {0}], [set[int](), set[int]()]
    with RayCollector(
        CountingEnv, policy, total_frames=300, num_collectors=2, frames_per_batch=10, create_env_kwargs=COUNTING,
        **given, **FREE,
    ) as collector:  # fmt: skip
        for batch in collector:
            assert collector.stats()["policy_version"] == version
            assert torch.equal(batch["action"][..., 0].long(), batch["collector", "policy_version"])
            (number,) = collectors_of(batch)
            acted[number].update(batch["collector", "policy_version"].tolist())
            assert acted[number] <= given_to[number]
            counts[number] += 1
            if counts[number] % every == 0:
                version += 1
                given_to[number].add(version)
            with torch.no_grad():
                policy.number.fill_(version)
    assert min(map(len, acted)) > 1


def test_collectors_that_have_ended_need_no_weights() -> None:
    given: dict[str, Any] = {"num_collectors": 2, "frames_per_batch": 10, "create_env_kwargs": COUNTING}
    with RayCollector(
        CountingEnv, Versioned(), total_frames=20, update_after_each_batch=True, **given, **FREE
    ) as collector:
        assert collector.next() is not None
        until(lambda: not collector.fleet.stats().workers)
        assert collector.next() is not None
        assert collector.next() is None


def test_actors_have_own_factories_and_split_trajectories() -> None:
    with RayCollector(
        CountingEnv, num_collectors=2, sync=True, frames_per_batch=20,
        create_env_kwargs=[{"lengths": 5}, {"lengths": 2}],
        policy_factory=[partial(constant, None, None, action=action) for action in (1, 4)], split_trajs=True, **FREE,
    ) as collector:  # fmt: skip
        batch = collector.next()
        mask = batch["collector", "mask"]
        assert batch.shape == (7, 5)
        assert mask.sum(-1).tolist() == [5, 5, 2, 2, 2, 2, 2]
        assert batch["action"][mask].tolist() == [1] * 10 + [4] * 10
