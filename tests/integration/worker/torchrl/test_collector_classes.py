"""TorchRL's collector classes: the one in this process value by value, the others' signatures over real workers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from cormorant_compat.torchrl import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiaSyncDataCollector,
    MultiSyncCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
    aSyncDataCollector,
)
from cormorant_testing.check import Checker
from cormorant_testing.envs import CountingEnv
from cormorant_testing.policies import Versioned, numbered
from cormorant_testing.recurrent import Counter
from cormorant_testing.scripts import until
from cormorant_worker.errors import FleetClosed, StateError


def envs(count: int = 2, **options: Any) -> list[CountingEnv]:
    return [CountingEnv(**{"lengths": (3, 4), **options}) for _ in range(count)]


def test_the_older_names_are_the_same_classes() -> None:
    assert (SyncDataCollector, MultiSyncDataCollector) == (Collector, MultiSyncCollector)
    assert (MultiaSyncDataCollector, aSyncDataCollector) == (MultiAsyncCollector, AsyncCollector)


def test_every_frame_comes_once_with_the_newest_weights() -> None:
    torch.manual_seed(0)
    policy = Versioned()
    with Collector(envs(action="box"), policy, frames_per_batch=10, total_frames=27) as collector:
        seed = collector.fleet.job.spec.collection.seed
        checker = Checker(job_seed=seed, num_envs=2, options={"lengths": (3, 4)}, action="box", acts_by_version=True)
        shapes = []
        for n, batch in enumerate(collector):
            shapes.append(tuple(batch.shape))
            checker.take(batch)
            assert batch.view(-1).shape == (batch.numel(),)  # contiguous, as TorchRL's
            assert not any(batch[flag].any() for flag in ("done", "terminated", "truncated"))
            collector.update_policy_weights_(weights=numbered(n + 1))
    assert shapes == [(2, 5), (2, 5), (2, 4)]
    assert collector.total_frames == 27


def test_an_optimizers_step_acts_at_once() -> None:
    policy = Versioned()
    batches = iter(Collector(CountingEnv(action="box"), policy, frames_per_batch=3))
    assert next(batches)["action"][..., 0].tolist() == [0, 0, 0]
    with torch.no_grad():
        policy.number.fill_(3)
    assert next(batches)["action"][..., 0].tolist() == [3, 3, 3]


def test_seeds_rule_the_first_batch() -> None:
    def first(seed: int | None) -> list[float]:
        torch.manual_seed(1)
        collector = Collector(envs(), frames_per_batch=10)
        if seed is not None:
            collector.set_seed(seed)
        batch = next(iter(collector))
        return [*batch["observation"][..., 0].flatten().tolist(), *batch["action"].flatten().tolist()]

    found = [first(seed) for seed in (None, 1, 2, 1, None)]
    assert found[1] == found[3]
    assert found[0] == found[4]
    assert found[0] != found[1] != found[2] != found[0]


def test_state_after_the_last_batch_continues_bit_by_bit() -> None:
    with Collector(envs(action="box"), Versioned(), frames_per_batch=10, total_frames=20) as collector:
        list(collector)
        collector.update_policy_weights_(weights=numbered(3))
        state = collector.state_dict()
        assert (state["frames"], state["iter"]) == (20, 2)
    again = [Collector(envs(action="box"), Versioned(), frames_per_batch=10, total_frames=40) for _ in range(2)]
    batches = []
    for collector in again:
        collector.load_state_dict(state)
        batches.append(next(iter(collector)))
    assert (batches[0] == batches[1]).all()
    assert batches[0]["action"][..., 0].unique().tolist() == [3.0]
    assert collector.stats()["frames"] == 30


def test_what_an_environment_raises_is_raised_as_it_is() -> None:
    collector = Collector(envs(failures=[{"how": "raise", "step": 3}]), frames_per_batch=20)
    with pytest.raises(ValueError, match="told to fail") as raised:
        next(iter(collector))
    (note,) = raised.value.__notes__
    assert note == "environment 0 raised ValueError: told to fail (after 2 completed steps since it was built)"


def test_steps_are_counted_where_trajectories_are_cut() -> None:
    given: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 30, "max_frames_per_traj": 4}
    given["policy_factory"] = lambda: None  # actions are random: so TorchRL's RandomPolicy is read
    first, again = (Collector(envs(lengths=9), **given) for _ in range(2))
    begun = first.next()
    again.load_state_dict(first.state_dict())  # in the middle of trajectories
    whole = torch.cat([begun, again.next()], 1)
    counts = whole["step_count"].squeeze(-1)
    assert counts.tolist() == [[0, 1, 2, 3] * 2 + [0, 1]] * 2
    assert torch.equal(whole["next", "step_count"].squeeze(-1), counts + 1)
    again.reset()
    assert again.next()["observation"][..., 2].tolist() == [[0, 1, 2, 3, 0]] * 2


def test_a_policy_beside_a_factory_is_where_weights_come_from() -> None:
    policy = Versioned()
    with Collector(envs(action="box"), policy, policy_factory=Versioned, frames_per_batch=6) as collector:
        batches = iter(collector)
        with torch.no_grad():
            policy.number.fill_(3)
        assert next(batches)["action"][..., 0].unique().tolist() == [0], "the factory's own acts"
        collector.update_policy_weights_()
        assert next(batches)["action"][..., 0].unique().tolist() == [3]


def test_whole_episodes_of_trajs_per_batch() -> None:
    given: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 40, "trajs_per_batch": 4}
    torch.manual_seed(0)
    with Collector(envs(), **given) as collector:
        with pytest.raises(RuntimeError, match=r"no length: .* or trajs_per_batch is given"):
            len(collector)
        batches = list(collector)
        # Two environments of 20 frames each: episodes of 3 and 4 by turns, and 3 + 3 frames of open ones.
        assert [tuple(batch.shape) for batch in batches] == [(4, 4), (4, 4), (2, 3)]
        masks = [batch["collector", "mask"] for batch in batches]
        assert [mask.sum(1).tolist() for mask in masks] == [[3, 3, 4, 3], [4, 3, 4, 4], [3, 3]]
        for batch, mask in zip(batches, masks, strict=True):
            assert batch.names == [None, "time"]
            ended = batch["next", "done"].squeeze(-1).sum(1)
            assert (ended == 1).all(), "one whole episode a row"
            assert batch["observation"][..., 2][mask].tolist() == [t for row in mask for t in range(int(row.sum()))]
        assert (collector.stats()["episodes_given_up"], collector.stats()["frames"]) == (2, 40)
    torch.manual_seed(0)
    with Collector(envs(), **given, traj_format="cat") as collector:
        with pytest.raises(StateError, match="a collector with trajs_per_batch has no state"):
            collector.state_dict()
        for batch, padded, mask in zip(collector, batches, masks, strict=True):
            assert torch.equal(batch["observation"], padded["observation"][mask])
            assert ("collector", "mask") not in batch.keys(True)


def test_compact_batches_have_no_second_observation() -> None:
    given: dict[str, Any] = {"frames_per_batch": 12, "max_frames_per_traj": 3, "info": ["step"]}

    def first(**options: Any) -> TensorDict:
        torch.manual_seed(0)
        with Collector(envs(), Counter(), **given, **options) as collector:
            return next(iter(collector))

    whole, compact = first(), first(compact_obs=True)
    gone = {("next", key) for key in ("observation", "count", "step_count")}
    assert set(whole.keys(True, True)) - set(compact.keys(True, True)) == gone
    assert all(torch.equal(whole[key], compact[key]) for key in compact.keys(True, True))
    assert torch.equal(whole["next", "step"], whole["next", "observation"][..., 2].long())
    assert not [key for key in whole.keys(True) if "info" in key]


def test_batches_are_handed_out_where_they_are_stored() -> None:
    with Collector(envs(), frames_per_batch=6, storing_device="meta") as collector:
        assert next(iter(collector))["observation"].device.type == "meta"


class Buffer:
    """Has what is read of TorchRL's buffers."""

    def __init__(self, num_dims: int = 1) -> None:
        self._storage = SimpleNamespace(max_size=1000, ndim=num_dims)
        self.batches: list[TensorDict] = []

    @property
    def frames(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def extend(self, batch: TensorDict) -> None:
        self.batches.append(batch)


@pytest.mark.parametrize(("made", "num_dims", "shape"), [(2, 2, (2, 5)), (1, 2, (1, 10)), (2, 3, (1, 2, 5))])
def test_a_storage_of_two_dimensions_gets_rows(made: int, num_dims: int, shape: tuple[int, ...]) -> None:
    buffer = Buffer(num_dims)
    with Collector(envs(made), frames_per_batch=10, total_frames=20, replay_buffer=buffer) as collector:
        assert list(collector) == [None, None]
    assert [tuple(batch.shape) for batch in buffer.batches] == [shape] * 2
    steps = torch.cat(buffer.batches, -1)["observation"][..., 2].reshape(made, -1)
    assert steps.tolist() == [([0, 1, 2, 0, 1, 2, 3] * 3)[: 20 // made]] * made


def act_on_a_frame(td: TensorDict) -> TensorDict:
    assert td["observation"].ndim == 1
    return td.set("action", torch.full((2,), 0.5))


def act_on_a_batch(td: TensorDict) -> TensorDict:
    return td.set("action", torch.full((td.shape[0], 2), 0.5))


class WithoutRow(TensorDictModuleBase):
    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self) -> None:
        super().__init__()
        self.share = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, td: TensorDict) -> TensorDict:
        return TensorDict({"action": self.share.expand(2)})


WITHOUT_WEIGHTS = TensorDictModule(lambda obs: torch.full_like(obs[:2], 0.5), ["observation"], ["action"])


@pytest.mark.parametrize("policy", [act_on_a_frame, act_on_a_batch, WITHOUT_WEIGHTS, WithoutRow()])
def test_a_policy_of_one_environment_may_take_frames_or_batches(policy: Any) -> None:
    with Collector(lambda: CountingEnv(lengths=4, action="box"), policy, frames_per_batch=6) as collector:
        batch = next(iter(collector))
    assert batch["action"].tolist() == [[0.5, 0.5]] * 6


def test_methods_and_attributes_are_called_by_name() -> None:
    with Collector(envs(), frames_per_batch=6) as collector:
        assert collector.get_distant_attr("requested_frames_per_batch") == 6
        assert collector.map_fn("get_distant_attr", [("init_random_frames",), ("fleet.layout.num_envs",)]) == [0, 2]
        assert collector.map_fn("stats", list_of_kwargs=[{"workers": "aggregate"}])[0]["workers_alive"] == 1
        assert "frames" not in collector.stats(workers="per_worker")
        with pytest.raises(ValueError, match="workers must be one of aggregate, per_worker and both, found 'bogus'"):
            collector.map_fn("stats", [("bogus",)])
        with pytest.raises(ValueError, match="is longer than argument 1"):
            collector.map_fn("stats", [()], [{}, {}])
        with pytest.raises(AttributeError, match="'Collector' object has no attribute 'frames_per_batsh'"):
            _ = collector.frames_per_batsh


class Waiting(CountingEnv):
    def __init__(self) -> None:
        super().__init__(lengths=100)
        self.is_stepping, self.may_step, self.breaks = threading.Event(), threading.Event(), False

    def step(self, action: Any) -> Any:
        self.is_stepping.set()
        assert self.may_step.wait(30)
        if self.breaks:
            raise ValueError("broken by then")
        return super().step(action)


def test_a_started_collector_fills_its_buffer() -> None:
    env, buffer = Waiting(), Buffer()
    collector = Collector(env, frames_per_batch=10, total_frames=100, replay_buffer=buffer)
    collector.start()
    assert env.is_stepping.wait(30)
    paused = collector.pause()
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(paused.__enter__)
        until(lambda: collector._running._holds)
        env.may_step.set()
        begun.result(30)
    env.is_stepping.clear()
    assert not env.is_stepping.wait(0.1)
    assert buffer.frames == 10, "the batch under way ended, and none began"
    assert not paused.__exit__(KeyError, KeyError("the user's: it goes on all the same"), None)
    collector._running._thread.join(30)
    collector.async_shutdown()
    assert buffer.frames == 100


@pytest.mark.parametrize("raises", [None, False, True])
def test_a_started_collector_is_shut_down_in_the_middle_of_a_batch(raises: bool | None) -> None:
    env = Waiting()
    env.breaks = raises is not None
    collector = Collector(env, frames_per_batch=10, total_frames=100, replay_buffer=Buffer())
    collector.start()
    assert env.is_stepping.wait(30)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(collector.shutdown, raise_on_error=bool(raises))
        until(lambda: collector.fleet._is_closed)
        env.may_step.set()
        with pytest.raises(ValueError, match="broken by then") if raises else nullcontext():
            ended.result(30)
    with pytest.raises(FleetClosed, match="the collector was shut down; make another one"):
        collector.fleet.borrow()


def test_scripts_read_and_exchange_attributes() -> None:
    buffer, made = Buffer(), envs(action="box")
    with Collector(
        made, Versioned(), frames_per_batch=9, total_frames=30, init_random_frames=4, replay_buffer=buffer
    ) as collector:
        assert (collector.requested_frames_per_batch, collector.frames_per_batch, len(collector)) == (9, 10, 3)
        assert (collector.init_random_frames, collector.total_frames) == (4, 30)
        assert collector.env == made
        seen: list[Any] = []
        collector.pre_collect_hook = lambda: seen.append("before")
        collector.postproc = lambda batch: seen.append(batch.numel()) or batch[:1]
        collector.post_collect_hook = lambda batch: seen.append(batch.numel())
        assert next(iter(collector)) is None
        assert (seen, buffer.frames, collector.replay_buffer) == (["before", 10, 5], 5, buffer)
        collector.postproc = lambda batch: batch["missing"]
        with pytest.raises(KeyError, match="missing"):
            collector.next()
        assert len(seen) == 4
        assert collector.stats()["frames"] == 10, "a batch that was not handed out does not count"


def test_a_collector_in_this_process_is_one() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backend": "direct", "num_collectors": 3}, "num_collectors 3, sync None, backend_options "),
        ({"backend": "rpc"}, 'backend "rpc" is not known here; use one of direct, process, '),
    ]
    for given, words in wrong:
        with pytest.raises(ValueError, match=words):
            Collector(envs(), frames_per_batch=10, **given)
    with pytest.raises(ValueError, match="num_collectors 3 is 3, and env_fns has 2 environments"):
        MultiSyncCollector(envs(), frames_per_batch=10, num_workers=3)


def test_a_tensordict_of_weights_is_no_mapping_of_collectors() -> None:
    collector = Collector(envs(action="box"), Versioned(), frames_per_batch=4)
    collector.update_policy_weights_({0: TensorDict(numbered(5))})
    assert next(iter(collector))["action"][..., 0].unique().tolist() == [5.0]
    collector.update_policy_weights_(numbered(6), worker_ids=np.int64(0))
    assert next(iter(collector))["action"][..., 0].unique().tolist() == [6.0]


def make() -> CountingEnv:
    return CountingEnv(lengths=9, action="box")


@pytest.mark.slow
def test_weights_by_collector_rule_the_first_sync_batch() -> None:
    with MultiSyncCollector([make, make], Versioned(), frames_per_batch=10, total_frames=20) as collector:
        collector.update_policy_weights_({0: numbered(4), 1: numbered(6)})
        assert next(iter(collector))["action"][..., 0].tolist() == [[4.0] * 5, [6.0] * 5]


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "kind"), [(True, MultiSyncCollector), (None, MultiAsyncCollector)])
def test_a_backend_chooses_the_class(sync: bool | None, kind: type) -> None:
    options: dict[str, Any] = {"frames_per_batch": 10, "total_frames": 20, "num_collectors": 2, "sync": sync}
    with Collector(make, backend_options={"vectorization": "inline"}, **options) as collector:
        assert type(collector) is kind
        assert not isinstance(collector, Collector)
        assert [batch.numel() for batch in collector] == [10, 10]
        assert collector.stats()["workers"] == 2


@pytest.mark.slow
def test_a_seed_rules_asynchronous_collectors_from_the_next_batch_on() -> None:
    with AsyncCollector(make, frames_per_batch=5, total_frames=200) as collector:
        batches = iter(collector)
        seeded = []
        for seed in (3, 4, 3):
            collector.set_seed(seed)
            seeded.append(torch.cat([next(batches)["observation"], next(batches)["observation"]]))
            # All that may be collected ahead is: it would come next.
            until(lambda: {worker.phase for worker in collector.fleet.stats().workers} == {"waiting"})
        assert torch.equal(seeded[0], seeded[2])
        assert not torch.equal(seeded[0], seeded[1])
        list(batches)
        assert collector.stats()["frames"] == 200, "what was dropped counts"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_methods_and_attributes_are_called_in_each_collectors_process(kind: Any) -> None:
    with kind([make] * 2, Versioned(), frames_per_batch=18, total_frames=180) as collector:
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        collector.map_fn("env.set_wrapper_attr", [("level", 1), ("level", 2)])
        assert collector.get_distant_attr("env.level") == [1, 2]
        batches = iter(collector)
        next(batches)
        assert max(collector.get_distant_attr("env._counts.total")) >= 9, "it is the environment that is stepped"
        collector.update_policy_weights_(numbered(3))
        assert collector.map_fn("env.get_wrapper_attr", list_of_kwargs=[{"name": "level"}] * 2) == [1, 2]
        assert collector.get_distant_attr("policy.bias[2]") == [3.0, 3.0]
        assert collector.map_fn("reset") == [None, None]
        collector.set_seed(1)
        with pytest.raises(AttributeError, match="level"):  # a seed builds environments again
            collector.get_distant_attr("env.level")
        with pytest.raises(KeyError, match="seed"):
            collector.map_fn("env.set_state", [(collector.map_fn("env.get_state")[0],), ({},)])
        with pytest.raises(ValueError, match="Expected 2 argument entries, one a collector, got 1"):
            collector.map_fn("env.reset", [()])
        with pytest.raises(AttributeError, match="has no attribute 'replay_buffer'"):
            collector.map_fn("replay_buffer.__len__")
