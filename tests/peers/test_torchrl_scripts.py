"""What TorchRL's scripts do with a collector beside iterating: random policies of its specs, and its Trainer.

`make test-peers` makes the environment that has TorchRL; elsewhere these tests are skipped.
"""

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs these tests")

from torchrl.data import Bounded, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv, StepCounter
from torchrl.modules import GRUModule, RandomPolicy
from torchrl.testing.mocking_classes import NestedCountingEnv

from cormorant_compat.torchrl import Collector, MultiSyncCollector
from cormorant_worker.errors import EnvBuildError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")


def test_a_random_policy_draws_from_its_own_spec() -> None:
    narrow = Bounded(-0.5, 0.25, shape=(1,))
    for make, spec in (
        (pendulum, narrow),
        (lambda: SerialEnv(2, pendulum), narrow),
        (lambda: SerialEnv(2, pendulum), narrow.expand(2, 1)),
    ):
        with Collector(make, RandomPolicy(spec), frames_per_batch=400) as collector:
            batch = next(iter(collector))
        actions = batch["action"]
        assert -0.5 <= float(actions.min()) < -0.45
        assert 0.2 < float(actions.max()) <= 0.25


def test_a_random_policy_of_the_environments_spec_is_the_collectors() -> None:
    env = pendulum()
    for policy in (RandomPolicy(), RandomPolicy(env.action_spec), RandomPolicy(env.full_action_spec)):
        with Collector(env, policy, frames_per_batch=100) as collector:
            batch = next(iter(collector))
        assert batch["collector", "policy_version"].unique().tolist() == [-1]
        assert float(batch["action"].abs().max()) > 1.5
        assert policy.action_spec is not None
    with MultiSyncCollector(
        [pendulum, pendulum], RandomPolicy(Bounded(0, 1, shape=(1,))), frames_per_batch=100
    ) as both:
        assert 0 <= float(next(iter(both))["action"].min()) < 0.2


@pytest.mark.parametrize("registers", [None, True, False])
def test_recurrent_policies_need_no_transforms(registers: bool | None) -> None:
    names = {"in_keys": ["observation", "state", "is_init"], "out_keys": ["features", ("next", "state")]}
    recurrent = GRUModule(input_size=3, hidden_size=8, num_layers=1, **names)
    head = TensorDictModule(nn.Linear(8, 1), in_keys=["features"], out_keys=["action"])
    policy = TensorDictSequential(recurrent, head)
    options = {"frames_per_batch": 20, "auto_register_policy_transforms": registers}
    with Collector(lambda: pendulum().append_transform(StepCounter(7)), policy, **options) as collector:
        batch = next(iter(collector))
    assert batch["is_init"].flatten().nonzero().flatten().tolist() == [0, 7, 14]
    assert not batch["state"][batch["is_init"].squeeze(-1)].any()
    goes_on = ~batch["is_init"][1:].squeeze(-1)
    assert torch.equal(batch["state"][1:][goes_on], batch["next", "state"][:-1][goes_on])


@pytest.mark.parametrize("kind", ["action", "reward", "done"])
def test_other_names_are_refused_with_a_remedy(kind: str) -> None:
    nested = {"nest_obs_action": kind == "action", "nest_reward": kind == "reward", "nest_done": kind == "done"}
    with pytest.raises(EnvBuildError, match=rf"the {kind} keys of .* collectors know .*{kind}.*: rename them"):
        Collector(NestedCountingEnv(**nested), frames_per_batch=10)


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
    assert collector.policy_version == 6
