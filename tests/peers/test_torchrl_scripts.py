"""What TorchRL's scripts do with a collector beside iterating: policies and environments of its own, its Trainer, its
weight schemes, and SAC of examples/short.

`make test-peers` makes the environment that has TorchRL; elsewhere these tests are skipped.
"""

import copy
import runpy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs these tests")

from torchrl.data import Bounded, Composite, LazyTensorStorage, OneHot, RayReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import ExcludeTransform, GymEnv, SerialEnv, StepCounter, TransformedEnv, UnaryTransform
from torchrl.envs.transforms import NextObservationDelta
from torchrl.modules import GRUModule, RandomPolicy
from torchrl.testing.mocking_classes import EnvWithDynamicSpec, MultiKeyCountingEnv, NestedCountingEnv

from cormorant_compat.torchrl import Collector, MultiSyncCollector, RayCollector
from cormorant_compat.torchrl.adapter import space_of
from cormorant_testing.envs import CountingEnv
from cormorant_testing.policies import Versioned
from cormorant_testing.scripts import until
from cormorant_worker.errors import EnvBuildError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")


def test_a_random_policy_draws_from_its_own_spec() -> None:
    for policy, low, high in ((RandomPolicy(Bounded(-0.5, 0.25, shape=(1,))), -0.5, 0.25), (RandomPolicy(), -2, 2)):
        with Collector(pendulum, policy, frames_per_batch=400) as collector:
            actions = next(iter(collector))["action"]
        assert low <= float(actions.min()) < low * 0.9
        assert high * 0.8 < float(actions.max()) <= high


def test_recurrent_policies_need_no_transforms() -> None:
    names = {"in_keys": ["observation", "state", "is_init"], "out_keys": ["features", ("next", "state")]}
    recurrent = GRUModule(input_size=3, hidden_size=8, num_layers=1, **names)
    head = TensorDictModule(nn.Linear(8, 1), in_keys=["features"], out_keys=["action"])
    policy = TensorDictSequential(recurrent, head)
    with Collector(lambda: pendulum().append_transform(StepCounter(7)), policy, frames_per_batch=20) as collector:
        batch = next(iter(collector))
    assert batch["is_init"].flatten().nonzero().flatten().tolist() == [0, 7, 14]
    assert not batch["state"][batch["is_init"].squeeze(-1)].any()
    goes_on = ~batch["is_init"][1:].squeeze(-1)
    assert torch.equal(batch["state"][1:][goes_on], batch["next", "state"][:-1][goes_on])


_IDS = ("collector", "traj_ids")
NESTED = [
    partial(NestedCountingEnv, max_steps=7, nest_obs_action=obs, nest_done=done, nest_reward=reward, batch_size=size)
    for obs, done, reward, size in product((True, False), (True, False), (True, False), ((), (3,)))
] + [partial(MultiKeyCountingEnv, max_steps=3, batch_size=size) for size in ((), (3,))]


def act_surely(td: TensorDict, *, spec: Composite) -> TensorDict:
    """Ones, and the first of the one-hot vectors: whole numbers, as TorchRL's own modules write them."""
    for key, leaf in spec.items(True, True):
        one = torch.eye(2, dtype=torch.int64)[0] if isinstance(leaf, OneHot) else torch.ones_like(leaf.zero())
        td.set(key, one.expand(*td.batch_size, *leaf.shape).clone())
    return td


@pytest.mark.parametrize("make", NESTED)
def test_nested_keys_are_torchrls_frame_by_frame(make: Any) -> None:
    from torchrl.collectors import Collector as TorchRLs

    policy = partial(act_surely, spec=make().full_action_spec_unbatched)
    given = {"policy": policy, "frames_per_batch": 30, "total_frames": 60, "trust_policy": True}
    with Collector(make(), **given) as collector:
        ours = list(collector)
    theirs = list(TorchRLs(make(), **given))
    for found, expected in zip(ours, theirs, strict=True):
        # TorchRL begins a trajectory with every frame of an agent that is done alone, while the environment goes on.
        keys = set(expected.keys(True, True)) - ({_IDS} if make.func is MultiKeyCountingEnv else set())
        flags = {key for flag in ("done", "terminated", "truncated") for key in (flag, ("next", flag))}
        assert set(found.keys(True, True)) - keys <= flags | {("collector", "policy_version"), _IDS}
        for key in keys:
            assert found[key].dtype == expected[key].dtype, key
            assert torch.equal(found[key], expected[key]), key
        if groups := {key[:-1] for key in keys if isinstance(key, tuple) and key[0] == "next" and len(key) > 2}:
            has_said = any(key[-1] in ("reward", "gift", "done") for key in keys if key[:-1] in groups)
            assert not has_said or all(found[group].shape == expected[group].shape for group in groups)


def test_what_groups_of_agents_cannot_have_is_refused() -> None:
    with pytest.raises(EnvBuildError, match=r"a spec of type OneHot and shape \[3, 4\] cannot be collected"):
        space_of(OneHot(4, shape=(2, 3, 4)), 1)
    with pytest.raises(ValueError, match=r"does not reach data.done, a flag of a group of agents; let the envi"):
        Collector(NestedCountingEnv(), frames_per_batch=10, max_frames_per_traj=3)


def test_non_tensors_and_changing_shapes_are_refused() -> None:
    with pytest.raises(EnvBuildError, match=r"a spec of shape \[3, -1, 2\] changes its size; pad it in the envir"):
        Collector(EnvWithDynamicSpec(), frames_per_batch=10)
    described = TransformedEnv(pendulum(), UnaryTransform(in_keys=["observation"], out_keys=["text"], fn=str))
    with pytest.raises(EnvBuildError, match=r"a spec of type NonTensor and shape .* or leave it out"):
        Collector(described, frames_per_batch=10)
    for env in pendulum(), SerialEnv(2, pendulum):
        collector = Collector(TransformedEnv(env, NextObservationDelta()), frames_per_batch=10)
        with collector, pytest.raises(KeyError, match="observation"):
            next(iter(collector))
    without = TransformedEnv(described, ExcludeTransform("text"))
    with Collector(without, frames_per_batch=10, total_frames=10) as collector:
        assert [batch.numel() for batch in collector] == [10]


def test_nested_keys_come_from_fleets_and_into_buffers() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    given = {"frames_per_batch": 20, "total_frames": 40, "reset_at_each_iter": True}
    with MultiSyncCollector([NestedCountingEnv], **given) as fleet:
        assert [batch["next", "data", "reward"].shape for batch in fleet] == [(1, 20, 3, 1)] * 2
    with Collector(NestedCountingEnv(batch_size=(2,)), replay_buffer=buffer, **given) as collector:
        assert list(collector) == [None, None]
    assert buffer.sample()["data"].shape == (8, 3)


def test_torchrls_trainer_trains_on_our_collector() -> None:
    from torchrl.modules import EGreedyModule, QValueActor
    from torchrl.objectives import DQNLoss
    from torchrl.trainers import ReplayBufferTrainer, Trainer, UpdateWeights

    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec, action_space="categorical")
    exploring = TensorDictSequential(actor, EGreedyModule(env.action_spec, annealing_num_steps=100))
    loss = DQNLoss(actor, action_space="categorical", delay_value=True)
    loss.make_value_estimator(gamma=0.99)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
    collector = Collector(env, exploring, frames_per_batch=50, total_frames=300, init_random_frames=100)
    trainer = Trainer(
        collector=collector, total_frames=300, frame_skip=1, optim_steps_per_batch=2, loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-3), progress_bar=False, save_trainer_file=None,
    )  # fmt: skip
    ReplayBufferTrainer(buffer, flatten_tensordicts=True).register(trainer)
    UpdateWeights(collector, 1).register(trainer)
    trainer.train()
    assert trainer.collected_frames == 300
    assert len(buffer) == 300
    assert collector.stats()["policy_version"] == 6


def test_a_scheme_of_torchrls_delivers_to_our_collector() -> None:
    from torchrl.weight_update import MultiProcessWeightSyncScheme

    parent = Versioned()
    with torch.no_grad():
        parent.number.fill_(1)
    sender = MultiProcessWeightSyncScheme()
    sender.init_on_sender(model_id="policy", weights=TensorDict.from_module(parent).data, devices=[torch.device("cpu")])
    # What a process that was started with the scheme has of it: the queues.
    receiver = copy.copy(sender)
    sender.connect()
    with RayCollector(
        CountingEnv, Versioned(), frames_per_batch=8, create_env_kwargs={"action": "box"}, vectorization="inline"
    ) as collector:
        collector.worker_idx = 0
        collector.register_scheme_receiver({"policy": receiver})
        assert collector.stats()["policy_version"] == 1
        assert collector.policy.number.item() == 1
        with torch.no_grad():
            parent.number.fill_(2)
        sender.send(TensorDict.from_module(parent).data)
        until(lambda: collector.stats()["policy_version"] == 2)
        while (batch := collector.next())["collector", "policy_version"].min() < 2:
            pass
        # The number in each action is that of the weights.
        assert (batch["action"][..., 0] == 2).all()


def test_collectors_fill_torchrls_ray_replay_buffer() -> None:
    given = {"frames_per_batch": 20, "total_frames": 40, "vectorization": "inline"}
    buffer = RayReplayBuffer(
        storage=partial(LazyTensorStorage, 100), ray_init_config={"num_cpus": 1}, remote_config={"num_cpus": 0}
    )
    try:
        with RayCollector(CountingEnv, replay_buffer=buffer, remote_configs={"num_cpus": 0}, **given) as collector:
            assert list(collector) == [None] * 2
        assert len(buffer) == 40
    finally:
        buffer.close()


def test_sac_fills_a_replay_buffer_and_learns(request: pytest.FixtureRequest) -> None:
    # Threads of small networks wait for each other beside other work: 9 s of CPU did not end within 300 s.
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "short" / "sac.py"))["main"]
    assert -2000 < main(600) < 0
