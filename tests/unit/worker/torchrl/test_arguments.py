"""Arguments of TorchRL's collectors: read and refused before anything starts."""

import inspect
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, get_type_hints

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn

from cormorant_compat.torchrl import OffPolicyCollectorConfig, OnPolicyCollectorConfig, sync_sync_collector
from cormorant_compat.torchrl.collector import FleetCollector
from cormorant_compat.torchrl.collectors import make_collector_onpolicy
from cormorant_compat.torchrl.plan import CollectionPlan, count_collectors, next_seed, share_out
from cormorant_compat.torchrl.policy import OnTensorDicts, as_policy, read_weights
from cormorant_compat.torchrl.pool import Pool, PoolOptions
from cormorant_compat.torchrl.settings import (
    MEANINGLESS,
    NEUTRAL,
    CollectorSettings,
    LocalKeywords,
    exploration_of,
    limit,
    read_settings,
)
from cormorant_testing.envs import CountingEnv
from cormorant_worker.collect.overrides import WorkerOverrides, read_overrides
from cormorant_worker.errors import ManifestError, WeightsError
from cormorant_worker.policy.exploration import ExplorationType


def test_type_checkers_know_every_argument() -> None:
    settings = {field.name: field.type for field in fields(CollectorSettings) if field.name != "frames_per_batch"}
    known = get_type_hints(LocalKeywords, localns={"Devices": object})
    assert known.keys() == settings.keys() | set(MEANINGLESS) | NEUTRAL.keys()
    assert {name: known[name] for name in settings if "device" not in name} == {
        name: kind for name, kind in settings.items() if "device" not in name
    }
    assert PoolOptions.__annotations__.keys() == inspect.signature(Pool).parameters.keys() - {"build"}


class Buffer(list[Any]):
    """Has what is read of TorchRL's."""

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self._storage = SimpleNamespace(max_size=max_size, ndim=1)


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
        (5, 1, 4, "num_env_per_collector 1 . num_collectors 4 is 4, fewer than the 5"),
        (5, None, 4, "5 environments at 2 a collector fill 3 collectors, not num_collectors 4"),
        (5, 2, 3, "5 environments at 2 a collector leave 1 for the last one.*give 6"),
        (4, 0, 2, "num_env_per_collector 0"),
        (0, 2, -1, "num_collectors -1"),
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
        ([], None, "empty list"),
        ("CartPole-v1", None, r"'CartPole-v1' \(str\) makes no environment"),
        (CountingEnv(), {"lengths": 2}, r"an environment that is built already \(CountingEnv\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            share_out(given, kwargs, 2, 1)


def test_zero_one_and_numpys_scalars_are_what_they_mean() -> None:
    given = {"reset_at_each_iter": -False, "pin_memory": 1, "split_trajs": np.True_, "frames_per_batch": np.int64(7)}
    settings = read_settings(given, num_collectors=1)
    assert (settings.reset_at_each_iter, settings.pin_memory, settings.split_trajs) == (False, True, True)
    assert [type(getattr(settings, name)) for name in given] == [bool, bool, bool, int]
    plan = CollectionPlan(mode="async", makers=share_out(CountingEnv, None, 1, 1), policy=None, settings=settings)
    assert plan.job().spec.collection.reset_at_each_batch is False
    two = np.int64(2)
    assert [len(own) for own in share_out(CountingEnv, None, two, two)] == [2, 2]
    assert count_collectors(CountingEnv, two) == 2


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"reset_at_each_iter": 2}, ValueError, "reset_at_each_iter 2 is neither true nor false"),
        ({"pin_memory": "no"}, ValueError, "pin_memory 'no' is neither true nor false"),
        ({"frames_per_bach": 3}, TypeError, "did you mean frames_per_batch"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch 0"),
        ({"frames_per_batch": 1.5}, ValueError, "frames_per_batch 1.5"),
        ({"total_frames": 0}, ValueError, "total_frames 0"),
        ({"total_frames": -2}, ValueError, "total_frames -2"),
        ({"init_random_frames": 0.5}, ValueError, "init_random_frames 0.5"),
        ({"reset_when_done": False}, TypeError, "reset_when_done=False means something to TorchRL's own"),
        ({"exploration_type": "median"}, ValueError, '"median" is not known; use one of random, mode'),
        ({"device": "cuda:99"}, ValueError, "device cuda:99 does not exist"),
        ({"device": "gpu"}, ValueError, "'gpu' is not a torch device"),
        ({"device": "mps"}, ValueError, "device mps cannot be used here: .*; use another, or cpu"),
        ({"storing_device": ["cpu", "cuda:99"]}, ValueError, "storing_device cuda:99 does not exist"),
        ({"device": ["cpu"] * 3}, ValueError, "device has 3 devices for 2 collectors"),
        ({"env_device": "cuda:99"}, ValueError, "env_device cuda:99 does not exist"),
        ({"postproc": 3}, ValueError, "postproc is 3, which cannot be called"),
        ({"vectorization": "threads"}, ValueError, '"threads" is not known'),
        ({"replay_buffer": 3}, ValueError, "replay_buffer is a int, which has no extend"),
        ({"replay_buffer": Buffer(199)}, ValueError, "holds 199 frames and frames_per_batch is 200"),
    ],
)
def test_values_that_cannot_be_are_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_settings(given, num_collectors=2)


def test_an_environment_that_was_sent_is_another_one_at_each_call() -> None:
    makers = share_out(CountingEnv(lengths=2), None, 2, 1)[0]
    sent = read_overrides(WorkerOverrides(envs=makers).to_bytes()).envs
    # Once more, as for an environment's own process.
    again = cloudpickle.loads(cloudpickle.dumps(sent[0]))
    made = [sent[0](), sent[1](), sent[0](), again()]
    assert len({id(env) for env in made}) == 4
    assert [env._lengths for env in made] == [(2,)] * 4


def test_arguments_that_are_fine_or_mean_nothing_are_accepted() -> None:
    for given in ({"replay_buffer": Buffer(200)}, {"replay_buffer": Buffer(9), "postproc": lambda batch: batch[:1]}):
        assert read_settings(given, num_collectors=2).replay_buffer is given["replay_buffer"]
    ignored = {"use_buffers": True, "no_cuda_sync": True, "extend_buffer": False, "auto_register_policy_transforms": 1}
    assert read_settings(ignored, num_collectors=1) == read_settings({}, num_collectors=1)


def test_exploration_types_are_read_from_strings_and_enums() -> None:
    assert exploration_of("random") is exploration_of(InteractionType.RANDOM) is ExplorationType.RANDOM
    assert exploration_of(InteractionType.DETERMINISTIC) is ExplorationType.DETERMINISTIC
    assert exploration_of(ExplorationType.MEAN) is ExplorationType.MEAN


def test_the_seed_that_comes_next_is_torchrls() -> None:
    # As torchrl 0.14.1 returns them for 1, 2 and 3 environments.
    assert [next_seed(0, links) for links in (1, 2, 3)] == [795726461, 2841183792, 2309840538]


def test_configs_have_torchrls_defaults_and_fields() -> None:
    on, off = OnPolicyCollectorConfig(), OffPolicyCollectorConfig()
    assert (on.collector_device, on.pin_memory, on.frames_per_batch) == (["cpu"], False, 1000)
    assert (on.total_frames, on.num_workers, on.env_per_collector) == (50_000_000, 32, 8)
    assert (on.seed, on.exploration_type, on.async_collection) == (42, "random", False)
    assert (off.multi_step, off.n_steps_return, off.init_random_frames) == (False, 3, 50_000)
    assert (off.max_frames_per_traj, off.gamma) == (-1, 0.99)
    with pytest.raises(ValueError, match="num_workers 4 and env_per_collector 8"):
        make_collector_onpolicy(CountingEnv, None, OnPolicyCollectorConfig(num_workers=4, env_per_collector=8))


def test_a_script_may_have_an_iterator_of_its_own() -> None:
    class Own(FleetCollector):
        def iterator(self) -> Iterator[TensorDict]:
            yield TensorDict()

    assert not next(iter(Own.__new__(Own))).keys()


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
