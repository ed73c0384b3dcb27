"""Arguments of RayCollector: read and refused before anything starts, and without Ray."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from cormorant_compat.torchrl import RayCollector
from cormorant_compat.torchrl.batches import EpisodePool, StoreInBuffer, mark_padding
from cormorant_compat.torchrl.plan import count_collectors
from cormorant_compat.torchrl.settings import own_settings, ray_options, read_settings, remote_options
from cormorant_testing.collecting import make_collector
from cormorant_testing.envs import CountingEnv
from cormorant_worker.collect.block import Block
from cormorant_worker.policy.exploration import ExplorationType


class ListBuffer(list[Any]):
    """Has extend, as lists do."""


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"create_env_fn": []}, ValueError, "create_env_fn is an empty list"),
        ({"create_env_fn": [CountingEnv] * 2, "num_collectors": 3}, ValueError, "2 entries and num_collectors is 3"),
        ({"num_collectors": 0}, ValueError, "num_collectors 0"),
        ({"num_workers_per_collector": 0}, ValueError, "num_workers_per_collector 0"),
        ({"collector_class": dict}, TypeError, "none of TorchRL's collectors"),
        ({"collector_kwargs": [{}]}, ValueError, "collector_kwargs has 1 entries for 2 collectors"),
        ({"collector_kwargs": {"devise": "cpu"}}, TypeError, "did you mean device"),
        ({"collector_kwargs": {"max_frames_per_traj": 1.5}}, ValueError, "max_frames_per_traj 1.5"),
        ({"collector_kwargs": [{"split_trajs": True}, {"split_trajs": False}]}, ValueError, "split_trajs differs"),
        (
            {"max_frames_per_traj": 5, "collector_kwargs": {"max_frames_per_traj": 7}},
            ValueError,
            "max_frames_per_traj is 5, and collector_kwargs has 7; keep one of them",
        ),
        ({"remote_configs": [{}] * 3}, ValueError, "remote_configs has 3 entries for 2 collectors"),
        ({"remote_configs": {"max_restarts": 3}}, ValueError, "remote_configs have max_restarts"),
        ({"policy_factory": [lambda: None] * 3}, ValueError, "policy_factory has 3 entries for 2 collectors"),
        ({"create_env_kwargs": [{}]}, ValueError, "create_env_kwargs has 1 entries for 2 collectors"),
        ({"max_weight_update_interval": -3}, ValueError, "max_weight_update_interval -3"),
        ({"update_after_each_batch": True}, ValueError, "update_after_each_batch publishes .* there is no policy"),
        (
            {"max_weight_update_interval": 3, "policy": lambda observation: observation},
            ValueError,
            "max_weight_update_interval 3 publishes .* the policy is a function, which has none",
        ),
        ({"weight_sync_schemes": {"policy": object()}}, ValueError, "weight_sync_schemes .*object.* was given"),
        ({"weight_updater": dict}, TypeError, "weight_updater is a dict, which has no push_weights"),
        ({"trajs_per_batch": 0}, ValueError, "trajs_per_batch 0"),
        ({"trajs_per_batch": 2, "split_trajs": True}, ValueError, "come split already"),
        (
            {"trajs_per_batch": 2, "replay_buffer": ListBuffer(), "buffer_in_workers": True},
            ValueError,
            "buffer_in_workers=False",
        ),
        ({"device": "cuda:99"}, ValueError, "device cuda:99 does not exist"),
        ({"collector_kwargs": [{}, {"policy_device": "xpu"}]}, ValueError, "policy_device xpu cannot be used here"),
        (
            {"device": "cuda:99", "ray_init_config": {"address": "10.0.0.1:6379"}},
            ValueError,
            "storing_device .left out, so that of device. cuda:99 does not exist",
        ),
        ({"sync": True, "storing_device": ["cpu", "meta"]}, ValueError, "differs between collectors"),
    ],
)
def test_bad_input_is_refused_with_its_values(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"create_env_fn": CountingEnv, "frames_per_batch": 10, "num_collectors": 2}
    if isinstance(arguments.get("create_env_fn"), list):
        del given["num_collectors"]
    with pytest.raises(error, match=words):
        RayCollector(**{**given, **arguments})


def test_a_callable_alone_makes_one_collector_and_a_list_one_each() -> None:
    assert [count_collectors(CountingEnv, None), count_collectors(CountingEnv, 3)] == [1, 3]
    assert count_collectors([CountingEnv] * 2, None) == count_collectors([CountingEnv] * 2, 2) == 2


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


def test_torchrls_own_scheme_for_the_policy_is_taken_and_no_other() -> None:
    class RayWeightSyncScheme: ...

    for given in (None, {}, {"policy": RayWeightSyncScheme()}):
        assert read_settings({"weight_sync_schemes": given}, num_collectors=1) == read_settings({}, num_collectors=1)
    for given in ({"critic": RayWeightSyncScheme()}, {"policy": RayWeightSyncScheme(), "critic": object()}):
        with pytest.raises(ValueError, match=r"weight_sync_schemes .* leave it out"):
            read_settings({"weight_sync_schemes": given}, num_collectors=1)


def test_rays_own_arguments_find_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    init = {"address": "auto", "runtime_env": {"env_vars": {"A": "1"}}, "object_store_memory": 10**8, "namespace": "n"}
    remote = remote_options({"num_cpus": 2, "memory": 5}, 2)
    options = ray_options(init, remote)
    assert (options.address, options.object_store_bytes, options.runtime_env) == ("auto", 10**8, init["runtime_env"])
    assert options.init == {"namespace": "n"}
    assert options.actors is remote
    assert remote == [{"num_cpus": 2, "memory": 5}] * 2
    assert ray_options(None, []).address is ray_options({"address": "local"}, []).address is None


def test_interval_of_updates_begins_again_with_each_one_of_an_updater() -> None:
    class Updated(RayCollector):
        """One collector without a fleet, whose updater counts."""

        def __init__(self) -> None:
            self._plan = SimpleNamespace(mode="async", num_collectors=1)
            self._settings = read_settings({}, num_collectors=1)
            self.pushed, self.weight_updater, self.policy, self.pre_collect_hook = 0, self, None, None
            self._updates_each, self._update_interval = False, 3
            self._batches_since, self._last = Counter(), ()
            self._taken, self._has_begun, self._seeded_at = None, True, 0.0
            loan = SimpleNamespace(parts=[SimpleNamespace(worker="cpu-0", sealed_at=0.0)], release=lambda: None)
            stats = SimpleNamespace(workers=[SimpleNamespace(name="cpu-0")])
            known = {"borrow": lambda: loan, "stats": lambda: stats, "version": 0, "receipt": lambda version: None}
            self.fleet = SimpleNamespace(**known)

        def push_weights(self, **_: Any) -> None:
            self.pushed += 1

    collector = Updated()
    pushed = []
    for _ in range(8):
        collector._begin()
        pushed.append(collector.pushed)
    assert pushed == [0, 0, 0, 1, 1, 1, 2, 2]


def test_paths_of_attributes_are_followed_called_and_refused() -> None:
    class Inner:
        depth = 3

        def add(self, n: int, *, more: int = 0) -> int:
            return self.depth + n + more

    class Outer:
        def __init__(self) -> None:
            self.schemes = {"policy": Inner(), "x.y": [Inner()]}

    execute: Any = RayCollector.cascade_execute
    outer = Outer()
    assert execute(outer, "schemes['policy'].add", 1, more=2) == 6
    assert execute(outer, 'schemes["x.y"][0].depth') == 3
    with pytest.raises(ValueError, match="which takes no arguments"):
        execute(outer, "schemes['policy'].depth", 1)
    with pytest.raises(AttributeError, match=r"dict has no \['critic'\] \(KeyError\)"):
        execute(outer, "schemes['critic'].add")
    with pytest.raises(AttributeError, match='cannot be read at "'):
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


def test_episodes_are_put_together_over_batches_padded_and_masked() -> None:
    pool = EpisodePool(read_settings({"trajs_per_batch": 2}, num_collectors=1))
    no, yes = False, True
    envs = ["cpu-0", "cpu-1"]
    pool.add(frames([[5, 5, 6], [9, 9, 9]], [[no, yes, no], [no, no, no]]), envs)
    assert not pool.complete
    pool.add(frames([[6, 6, 7], [9, 0, 0]], [[no, yes, no], [yes, no, no]], lengths=[3, 1]), envs)
    found = pool.complete.popleft()
    assert found["n"].tolist() == [[1, 2, 0], [3, 1, 2]]
    assert found["collector", "mask"].tolist() == [[True, True, False], [True, True, True]]
    assert found.names == [None, "time"]
    assert pool.finish()
    assert pool.complete.popleft()["n"].tolist() == [[4, 5, 6, 4]]
    assert not pool.finish()
    assert pool.given_up == 1


def test_what_a_dead_collector_began_is_given_up_and_counted() -> None:
    pool = EpisodePool(read_settings({"trajs_per_batch": 1}, num_collectors=1))
    no, yes = False, True
    pool.add(frames([[5, 5], [6, 6]], [[no, no], [no, no]]), ["a", "b"])
    assert not pool.complete
    # Who took the place of "a" begins an episode of its own; "b" goes on.
    pool.add(frames([[7, 7], [6, 6]], [[no, yes], [no, yes]]), ["a", "b"])
    assert [batch["n"].tolist() for batch in pool.complete] == [[[1, 2]], [[3, 4, 3, 4]]]
    assert pool.given_up == 1
    pool.add(frames([[8, 8]], [[no, no]]), ["a"])
    pool.clear()
    assert pool.given_up == 2
    pool.add(frames([[8, 8]], [[no, yes]]), ["a"])
    assert pool.complete.popleft()["n"].tolist() == [[1, 2]]


def test_stored_batches_are_split_and_processed() -> None:
    collector = make_collector(num_envs=2, lengths=(3,))
    block = Block(collector.layout(5))
    collector.fill(block, 10)
    buffer = ListBuffer()
    given: dict[str, Any] = {"replay_buffer": buffer, "frames_per_batch": 10}
    StoreInBuffer(read_settings(given, num_collectors=1))(block)
    assert [int(frame["next", "terminated"]) for frame in buffer] == [0, 0, 1, 0, 0] * 2
    buffer.clear()
    shapes: list[Any] = []
    given |= {"split_trajs": True, "postproc": lambda batch: shapes.append(batch.shape) or batch}
    StoreInBuffer(read_settings(given, num_collectors=1))(block)
    assert shapes == [(4, 3)]
    assert len(buffer) == 10
