"""Arguments of TorchRL's collectors, RayCollector's among them, are read and refused before the start; and batches."""

import inspect
import sys
import threading
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn

from cormorant_compat.torchrl import (
    OffPolicyCollectorConfig,
    OnPolicyCollectorConfig,
    RayCollector,
    sync_sync_collector,
)
from cormorant_compat.torchrl.batches import EpisodePool, StoreInBuffer, mark_padding
from cormorant_compat.torchrl.collectors import make_collector_onpolicy
from cormorant_compat.torchrl.plan import make_plan, next_seed, share_out
from cormorant_compat.torchrl.policy import OnTensorDicts, as_policy, read_weights
from cormorant_compat.torchrl.pool import Pool, PoolOptions
from cormorant_compat.torchrl.settings import (
    exploration_of,
    limit,
    own_settings,
    ray_options,
    read_settings,
    remote_options,
)
from cormorant_testing.collecting import make_collector
from cormorant_testing.envs import CountingEnv
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.overrides import WorkerOverrides, read_overrides
from cormorant_worker.errors import ControlTimeout, EnvBuildError, ManifestError, WeightsError
from cormorant_worker.policy.exploration import ExplorationType


def test_type_checkers_know_every_option_of_pools() -> None:
    assert PoolOptions.__annotations__.keys() == inspect.signature(Pool).parameters.keys() - {"build"}


def buffer_of(max_size: int) -> Any:
    return SimpleNamespace(_storage=SimpleNamespace(max_size=max_size))


@pytest.mark.parametrize(
    ("n", "per", "count", "expected"),
    [
        (6, None, 3, [2, 2, 2]),
        (6, 2, None, [2, 2, 2]),
        (6, 3, 2, [3, 3]),
        (4, None, None, [1, 1, 1, 1]),
        (0, 2, 3, [2, 2, 2]),
        (0, 4, None, [4]),
        (0, None, 3, [1, 1, 1]),
        (0, None, None, [1]),
    ],
)
def test_environments_are_shared_out_as_the_helpers_say(
    n: int, per: int | None, count: int | None, expected: list[int]
) -> None:
    makers = share_out([CountingEnv] * n if n else CountingEnv, None, per, count)
    assert [len(own) for own in makers] == expected


@pytest.mark.parametrize(
    ("n", "per", "count", "words"),
    [
        (5, 1, 4, "num_env_per_collector 1 . num_collectors 4 is 4, and env_fns has 5"),
        (5, None, 4, "num_env_per_collector 2 . num_collectors 4 is 8, and env_fns has 5"),
        (5, 2, None, "num_env_per_collector 2 . num_collectors 3 is 6, and env_fns has 5"),
        (4, 0, 2, "num_env_per_collector 0"),
        (0, 2, -1, "num_collectors -1"),
        (2, None, 3, "num_collectors 3 is 3, and env_fns has 2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(n: int, per: int | None, count: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        share_out([CountingEnv] * n if n else CountingEnv, None, per, count)


def test_env_kwargs_are_per_environment_and_of_one_length() -> None:
    makers = share_out(CountingEnv, [{"lengths": 2}, {"lengths": 3}], 2, 1)
    assert [maker()._lengths for maker in makers[0]] == [(2,), (3,)]
    makers = share_out([CountingEnv, CountingEnv], {"lengths": 4}, None, 2)
    assert [maker()._lengths for (maker,) in makers] == [(4,), (4,)]
    for given, kwargs, words in (
        ([CountingEnv] * 2, [{}], "env_kwargs has 1 entries for 2 environments"),
        ([], None, "the list of environments is empty"),
        ("CartPole-v1", None, r"'CartPole-v1' \(str\) makes no environment"),
        (CountingEnv(), {"lengths": 2}, r"an environment that is built already \(CountingEnv\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            share_out(given, kwargs, 2, 1)
    with pytest.raises(EnvBuildError, match=r"maker returned a builtins\.int"):
        share_out(lambda: 3, None, 1, 1)[0][0]()


def test_zero_one_and_numpys_scalars_are_what_they_mean() -> None:
    given = {"reset_at_each_iter": -False, "pin_memory": 1, "split_trajs": np.True_, "frames_per_batch": np.int64(7)}
    plan = make_plan("async", share_out(CountingEnv, None, 1, 1), None, given)
    settings = plan.settings
    assert (settings["reset_at_each_iter"], settings["pin_memory"], settings["split_trajs"]) == (False, True, True)
    assert [type(settings[name]) for name in given] == [bool, bool, bool, int]
    assert plan.job().spec.collection.reset_at_each_batch is False
    two = np.int64(2)
    assert [len(own) for own in share_out(CountingEnv, None, two, two)] == [2, 2]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"reset_at_each_iter": 2}, ValueError, "reset_at_each_iter 2 is neither true nor false"),
        ({"pin_memory": "no"}, ValueError, "pin_memory 'no' is neither true nor false"),
        ({"frames_per_bach": 3}, TypeError, "no argument frames_per_bach=3; known: total_frames, "),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch 0"),
        ({"frames_per_batch": 1.5}, ValueError, "frames_per_batch 1.5"),
        ({"total_frames": 0}, ValueError, "total_frames 0"),
        ({"total_frames": -2}, ValueError, "total_frames -2"),
        ({"init_random_frames": 0.5}, ValueError, "init_random_frames 0.5"),
        ({"reset_when_done": False}, TypeError, "no argument reset_when_done=False"),
        ({"seed": 0}, TypeError, "no argument seed=0"),
        ({"trajs_per_batch": 4, "traj_format": "flat"}, ValueError, "must be 'padded' or 'cat', found 'flat'"),
        ({"traj_format": "cat"}, ValueError, "is how whole episodes are handed out; give trajs_per_batch"),
        ({"exploration_type": "median"}, ValueError, '"median" is not known; use one of random, mode'),
        ({"device": "cuda:99"}, ValueError, "device 'cuda:99' cannot be used here"),
        ({"device": "gpu"}, ValueError, "'gpu' cannot be used here"),
        ({"device": "mps"}, ValueError, "device 'mps' cannot be used here: .*; use another, or cpu"),
        ({"storing_device": ["cpu", "cuda:99"]}, ValueError, "storing_device 'cuda:99' cannot be used here"),
        ({"device": ["cpu"] * 3}, ValueError, "device has 3 devices for 2 collectors"),
        ({"env_device": "cuda:99"}, ValueError, "env_device 'cuda:99' cannot be used here"),
        ({"replay_buffer": buffer_of(199)}, ValueError, "holds 199 frames and frames_per_batch is 200"),
    ],
)
def test_values_that_cannot_be_are_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_plan("async", share_out(CountingEnv, None, 1, 2), None, given)


def test_an_environment_that_was_sent_is_another_one_at_each_call() -> None:
    makers = share_out(CountingEnv(lengths=2), None, 2, 1)[0]
    sent = read_overrides(WorkerOverrides(envs=makers).to_bytes()).envs
    # Once more, as for an environment's own process.
    again = cloudpickle.loads(cloudpickle.dumps(sent[0]))
    made = [sent[0](), sent[1](), sent[0](), again()]
    assert len({id(env) for env in made}) == 4
    assert [env._lengths for env in made] == [(2,)] * 4


def test_arguments_that_are_fine_or_mean_nothing_are_accepted() -> None:
    for given in ({"replay_buffer": buffer_of(200)}, {"replay_buffer": buffer_of(9), "postproc": len}):
        assert read_settings(given)["replay_buffer"] is given["replay_buffer"]
    ignored = {"use_buffers": True, "no_cuda_sync": True, "extend_buffer": False, "auto_register_policy_transforms": 1}
    torchrls = dict.fromkeys(("compile_policy", "cudagraph_policy", "track_policy_version", "set_truncated"), False)
    torchrls |= dict.fromkeys(("interruptor", "weight_updater", "worker_idx", "trajs_per_write"))
    torchrls |= {"reset_when_done": True, "track_traj_ids": True, "cat_results": "stack", "weight_recv_schemes": {}}
    assert read_settings({**ignored, **torchrls, "weight_sync_schemes": {"policy": object()}}) == read_settings({})


def test_exploration_types_are_read_from_strings_and_enums() -> None:
    assert exploration_of("random") is exploration_of(InteractionType.RANDOM) is ExplorationType.RANDOM
    assert exploration_of(InteractionType.DETERMINISTIC) is ExplorationType.DETERMINISTIC
    assert exploration_of(ExplorationType.MEAN) is ExplorationType.MEAN


def test_the_seed_that_comes_next_is_torchrls() -> None:
    # As torchrl 0.14.1 returns them for 1, 2 and 3 environments.
    assert [next_seed(0, links) for links in (1, 2, 3)] == [795726461, 2841183792, 2309840538]


def test_configs_have_torchrls_defaults_and_fields() -> None:
    on: dict[str, Any] = {"collector_device": ["cpu"], "pin_memory": False, "frames_per_batch": 1000, "seed": 42}
    on |= {"total_frames": 50_000_000, "num_workers": 32, "env_per_collector": 8, "exploration_type": "random"}
    on |= {"async_collection": False, "max_frames_per_traj": -1, "gamma": 0.99}
    off = {"multi_step": False, "n_steps_return": 3, "init_random_frames": 50_000}
    assert (asdict(OnPolicyCollectorConfig()), asdict(OffPolicyCollectorConfig())) == (on, on | off)
    with pytest.raises(ValueError, match="num_workers 4 and env_per_collector 8: a collector has more"):
        make_collector_onpolicy(CountingEnv, None, OnPolicyCollectorConfig(num_workers=4, env_per_collector=8))


def test_policies_are_read_as_torchrl_reads_them() -> None:
    class OnTd(nn.Module):
        def forward(self, tensordict: TensorDict) -> TensorDict:
            return tensordict.set("action", torch.zeros(len(tensordict), dtype=torch.int64))

    class Hinted(nn.Module):
        def forward(self, batch: TensorDictBase) -> TensorDictBase:
            return batch

    module = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    assert as_policy(None) is None
    assert as_policy(module) is module
    assert as_policy(layer := nn.Linear(4, 2)) is layer
    assert as_policy(print) is print, "several arguments"

    def unreadable(any_: TensorDict) -> TensorDict:
        return any_

    unreadable.__annotations__["any_"] = "torch.missing"
    for policy, is_trusted in ((OnTd(), False), (Hinted(), False), (lambda td: td, False), (unreadable, True)):
        assert isinstance(as_policy(policy, is_trusted=is_trusted), OnTensorDicts)
    with pytest.raises(TypeError, match="the policy is 3"):
        as_policy(3)


def test_weights_come_from_modules_tensordicts_state_dicts() -> None:
    layer = nn.Linear(2, 1)
    policy = TensorDictModule(layer, in_keys=["observation"], out_keys=["action"])
    names = {"module.weight", "module.bias"}
    for given in (policy, TensorDict.from_module(policy), dict(policy.state_dict())):
        found = read_weights(given, policy=policy)
        assert set(found) == names
        assert torch.equal(found["module.weight"], layer.weight)
        assert not found["module.weight"].requires_grad
    assert set(read_weights(layer, policy=OnTensorDicts(layer))) == names
    with pytest.raises(WeightsError, match="weights are a int"):
        read_weights(3, policy=policy)
    with pytest.raises(WeightsError, match="weights a are not tensors"):
        read_weights({"a": "b"}, policy=policy)


def test_unpicklable_object_is_refused_before_the_start() -> None:
    lock = threading.Lock()
    with pytest.raises(
        ManifestError, match="cannot send the environment makers and the policy to worker processes: cannot pickle"
    ):
        sync_sync_collector(lambda: CountingEnv(lengths=lock), None, 1, 1)


@pytest.mark.parametrize(("given", "meant"), [(-1, 0), (None, 0), (7, 7), (sys.maxsize, 2**53 - 1)])
def test_huge_numbers_become_the_largest_count(given: int | None, meant: int) -> None:
    assert limit(given) == meant


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_workers_per_collector": 0}, ValueError, "num_workers_per_collector 0"),
        ({"collector_class": dict}, TypeError, "none of TorchRL's collectors"),
        ({"collector_kwargs": [{}]}, ValueError, "collector_kwargs has 1 entries for 2 collectors"),
        ({"collector_kwargs": {"devise": "cpu"}}, TypeError, "collector_kwargs have no devise; known: "),
        ({"collector_kwargs": {"max_frames_per_traj": 1.5}}, ValueError, "max_frames_per_traj 1.5"),
        ({"collector_kwargs": [{"split_trajs": True}, {}]}, TypeError, "collector_kwargs have no split_trajs"),
        ({"remote_configs": [{}] * 3}, ValueError, "remote_configs has 3 entries for 2 collectors"),
        ({"remote_configs": {"max_restarts": 3}}, ValueError, "remote_configs have max_restarts"),
        ({"policy_factory": [lambda: None] * 3}, ValueError, "policy_factory has 3 entries for 2 collectors"),
        ({"max_weight_update_interval": -3}, ValueError, "max_weight_update_interval -3"),
        ({"trajs_per_batch": 0}, ValueError, "trajs_per_batch 0"),
        ({"trajs_per_batch": 2, "split_trajs": True}, ValueError, "come split already"),
        ({"collector_kwargs": [{}, {"policy_device": "xpu"}]}, ValueError, "policy_device 'xpu' cannot be used here"),
        (
            {"device": "cuda:99", "ray_init_config": {"address": "10.0.0.1:6379"}},
            ValueError,
            "storing_device .left out, so that of device. 'cuda:99' cannot be used here",
        ),
        ({"sync": True, "storing_device": ["cpu", "meta"]}, ValueError, "differs between collectors"),
    ],
)
def test_bad_input_is_refused_with_its_values(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"create_env_fn": CountingEnv, "frames_per_batch": 10, "num_collectors": 2}
    with pytest.raises(error, match=words):
        RayCollector(**{**given, **arguments})


def test_own_settings_are_read_and_the_mapping_kept() -> None:
    mine = [{"device": "cpu", "max_frames_per_traj": 7}, {"exploration_type": "mode", "init_random_frames": -1}]
    copied = [dict(one) for one in mine]
    given, fields = own_settings(mine, num_collectors=2, given={"device": "meta", "postproc": None})
    assert given == {"device": ["cpu", "meta"], "postproc": None}
    assert fields == (
        {"max_frames_per_trajectory": 7},
        {"exploration_type": ExplorationType.MODE, "init_random_frames": 0},
    )
    assert mine == copied
    ours = {"storing_device": "cpu", "split_trajs": True, "use_buffers": False, "no_cuda_sync": True}
    given, fields = own_settings(ours, num_collectors=2, given={})
    assert (given, fields) == ({"storing_device": ["cpu", "cpu"], "split_trajs": True}, ({}, {}))


def test_rays_own_arguments_find_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    init = {"address": "auto", "runtime_env": {"env_vars": {"A": "1"}}, "namespace": "n"}
    remote = remote_options({"num_cpus": 2, "memory": 5}, 2)
    options = ray_options(init, remote)
    assert (options.address, options.runtime_env) == ("auto", init["runtime_env"])
    assert options.init == {"namespace": "n"}
    assert options.actors is remote
    assert remote == [{"num_cpus": 2, "memory": 5}] * 2
    assert ray_options(None, []).address is ray_options({"address": "local"}, []).address is None
    # A connected process: Ray uploads no folders any more, and TorchRL ignores the whole mapping.
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert ray_options({"runtime_env": {"working_dir": "."}}, []).runtime_env == {}


class Fleetless(RayCollector):
    """One collector, whose fleet lends one batch again and again, notes its sizes, and starts no second collector."""

    def _open(self, job: Any, parts: Any) -> Any:
        self._parts, self.sizes = [one.to_bytes() for one in parts], list[int]()
        part = SimpleNamespace(worker="cpu-0", sealed_at=0.0)
        loan = SimpleNamespace(parts=[part], release=lambda: None)
        none = {"resume": lambda: None, "receipt": lambda version: None}
        return SimpleNamespace(resize=self.resize, borrow=lambda: loan, version=0, **none)

    def resize(self, size: int, *, wait: bool = True) -> None:
        self.sizes.append(size)
        if wait:
            raise ControlTimeout("not placed in time")


def test_interval_of_updates_begins_again_with_each_one_of_an_updater() -> None:
    pushed: list[Any] = []
    updater = SimpleNamespace(push_weights=lambda **given: pushed.append(given))
    collector = Fleetless(CountingEnv, frames_per_batch=10, weight_updater=updater, max_weight_update_interval=3)
    counts = []
    for _ in range(8):
        collector._begin()
        counts.append(len(pushed))
    assert counts == [0, 0, 0, 1, 1, 1, 2, 2]
    collector._updates_each, collector._last = True, ("cpu-1",)  # of an addition that failed
    collector._begin()
    assert len(pushed) == 2


def test_collectors_that_cannot_start_are_not_added() -> None:
    collector = Fleetless(CountingEnv, frames_per_batch=10)
    with pytest.raises(ControlTimeout):
        collector.add_collectors([CountingEnv] * 2)
    assert (collector.sizes, collector.num_collectors) == ([3, 1], 1)
    assert [len(known) for known in (collector._parts, collector._remote, collector._devices)] == [1, 1, 1]


def test_paths_of_attributes_are_followed_called_and_refused() -> None:
    inner = SimpleNamespace(depth=3, add=lambda n, *, more: 3 + n + more)
    outer = SimpleNamespace(schemes={"policy": inner, "x.y": [inner]})
    execute: Any = RayCollector.cascade_execute
    assert execute(outer, "schemes['policy'].add", 1, more=2) == 6
    assert execute(outer, 'schemes["x.y"][0].depth') == 3
    with pytest.raises(TypeError, match="'int' object is not callable"):
        execute(outer, "schemes['policy'].depth", 1)
    with pytest.raises(AttributeError, match=r"dict has no \['critic'\] \(KeyError\)"):
        execute(outer, "schemes['critic'].add")
    with pytest.raises(AttributeError, match=r"policy.*cannot be read"):
        execute(outer, "schemes[policy].add")


def frames(ids: list[list[int]], ends: list[list[bool]], lengths: list[int] | None = None) -> TensorDict:
    number = torch.arange(torch.tensor(ids).numel()).reshape(len(ids), -1) + 1
    batch = TensorDict(
        {"n": number, "next": {"done": torch.tensor(ends).unsqueeze(-1)}, "collector": {"traj_ids": torch.tensor(ids)}},
        batch_size=number.shape,
    )
    if lengths is not None:
        batch["collector", "mask"] = torch.arange(number.shape[1])[None] < torch.tensor(lengths)[:, None]
    return batch


def test_padding_has_the_trajectory_id_of_torchrls() -> None:
    batch = frames([[5, 6, 6], [0, 0, 0]], [[True, False, False]] * 2, lengths=[2, 1])
    mark_padding(batch)
    assert batch["collector", "traj_ids"].tolist() == [[5, 6, -1], [0, -1, -1]]


def test_open_episode_keeps_its_own_frames_alone() -> None:
    pool = EpisodePool(read_settings({"trajs_per_batch": 1}))
    batch = frames([[1] * 10] + [[2] * 10] * 99, [[False] * 10] + [[False] * 9 + [True]] * 99)
    pool.add(batch, range(100))
    ((_, (piece,)),) = pool._open.values()
    assert piece["n"].untyped_storage().nbytes() == 10 * 8, "not those of all others beside it"


def test_what_a_dead_collector_began_is_given_up_and_counted() -> None:
    pool = EpisodePool(read_settings({"trajs_per_batch": 1}))
    no, yes = False, True
    pool.add(frames([[5, 5], [6, 6]], [[no, no], [no, no]]), ["a", "b"])
    assert pool.take() is None
    # Who took the place of "a" begins an episode of its own; "b" goes on.
    pool.add(frames([[7, 7, 0], [6, 6, 6]], [[no, yes, no], [no, no, yes]], lengths=[2, 3]), ["a", "b"])
    assert [pool.take()["n"].tolist() for _ in range(2)] == [[[1, 2]], [[3, 4, 4, 5, 6]]]
    assert pool.given_up == 1
    pool.add(frames([[8, 8]], [[no, no]]), ["a"])
    pool.clear()
    assert pool.given_up == 2
    pool.add(frames([[8, 8]], [[no, yes]]), ["a"])
    assert pool.take()["n"].tolist() == [[1, 2]]


def test_stored_batches_are_split_and_processed() -> None:
    collector = make_collector(num_envs=2, lengths=(3,))
    block = Block(collector.layout(5))
    collector.fill(block, 10)
    buffer: list[Any] = []
    given: dict[str, Any] = {"replay_buffer": buffer, "frames_per_batch": 10}
    StoreInBuffer(read_settings(given))(block)
    assert [int(frame["next", "terminated"]) for frame in buffer] == [0, 0, 1, 0, 0] * 2
    buffer.clear()
    shapes: list[Any] = []
    given |= {"split_trajs": True, "postproc": lambda batch: shapes.append(batch.shape) or batch}
    StoreInBuffer(read_settings(given))(block)
    assert shapes == [(4, 3)]
    assert len(buffer) == 10
    given["replay_buffer"] = SimpleNamespace(client=lambda: buffer, extend=None)  # as TorchRL's RayReplayBuffer
    StoreInBuffer(read_settings(given))(block)
    assert len(buffer) == 20
