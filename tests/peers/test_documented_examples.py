"""The examples in the documentation of what we are compatible with, verbatim but for their imports and sizes.

`docs/reference/compatibility.md` lists the documents. Two examples read a name that they do not define: it is defined
here before them, and nothing else is changed. And what docs/how-to/read-a-dataset.md says of TorchRL's ReplayBuffer:
a buffer has every frame.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs these tests")

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyMemmapStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.envs import Compose, DoubleToFloat, GymEnv, ParallelEnv, RewardSum, StepCounter, TransformedEnv

import cormorant
from cormorant.torchrl import MultiaSyncDataCollector, RayCollector, SyncDataCollector, aSyncDataCollector
from cormorant_testing.collecting import make_job
from cormorant_testing.envs import CountingEnv
from cormorant_testing.scripts import run_script
from cormorant_testing.snippets import blocks

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

RAY_COLLECTOR = """
from torch import nn
from tensordict.nn import TensorDictModule
from torchrl.envs.libs.gym import GymEnv
from cormorant_compat.torchrl import Collector
from cormorant_compat.torchrl import RayCollector
env_maker = lambda: GymEnv("Pendulum-v1", device="cpu")
policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
distributed_collector = RayCollector(
    create_env_fn=[env_maker],
    policy=policy,
    collector_class=Collector,
    max_frames_per_traj=50,
    init_random_frames=-1,
    reset_at_each_iter=-False,
    collector_kwargs={
        "device": "cpu",
        "storing_device": "cpu",
    },
    num_collectors=1,
    total_frames=10000,
    frames_per_batch=200,
)
collector = distributed_collector
for i, data in enumerate(collector):
    if i == 2:
        print(data)
        break
collector.shutdown()
"""

WRAPPER = """
import envpool
from cormorant_compat.torchrl import MultiThreadedEnvWrapper
env_base = envpool.make(
    task_id="Pong-v5", env_type="gym", num_envs=4, gym_reset_return_info=True
)
envpool_env = env_base
env = MultiThreadedEnvWrapper(envpool_env)
env.reset()
print(env.rand_step())
"""

MULTI_THREADED_ENV = """
from cormorant_compat.torchrl import MultiThreadedEnv
env = MultiThreadedEnv(num_workers=3, env_name="Pendulum-v1")
env.reset()
env.rand_step()
print(env.rollout(5))
env.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "shape"),
    [(RAY_COLLECTOR, "batch_size=torch.Size([200])"), (WRAPPER, "[4]"), (MULTI_THREADED_ENV, "[3, 5]")],
)
def test_documented_scripts_run_to_their_ends(example: str, shape: str, tmp_path: Path) -> None:
    done = run_script(example, cwd=tmp_path, timeout=240, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr
    assert shape in done.stdout


class Scheme:
    """Receives a connection, as TorchRL's schemes do."""

    info: tuple[Any, int] | None = None

    def receive(self) -> None:
        return None

    def _set_dist_connection_info(self, info: Any, worker_idx: int) -> str:
        self.info = info, worker_idx
        return "connected"


@pytest.mark.slow
def test_documented_methods_take_what_their_examples_give() -> None:
    def module() -> TensorDictModule:
        return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])

    policy_module = module()
    policy: dict[str, Any] = {"policy": policy_module, "actor": module(), "critic": module()}
    actor_module, trained_policy = module(), module()
    weights_td = weights_tensordict = actor_weights = critic_weights = TensorDict.from_module(module()).data
    collector = RayCollector(lambda: CountingEnv(action="box"), policy, frames_per_batch=4, vectorization="inline")
    try:
        collector.update_policy_weights_(policy_module)
        collector.update_policy_weights_(weights_tensordict)
        collector.update_policy_weights_(weights=weights_td, model_id="actor")
        collector.update_policy_weights_(policy=actor_module, model_id="actor")
        collector.update_policy_weights_(weights_dict={"actor": actor_weights, "critic": critic_weights})
        assert collector.stats()["policy_version"] == 5
        collector.receive_weights()
        collector.receive_weights(trained_policy)
        collector.receive_weights(weights_tensordict)
        collector.receive_weights(weights=weights_td)
        collector.receive_weights(policy=trained_policy)
        assert collector.stats()["policy_version"] == 10
        collector.register_scheme_receiver({"policy": Scheme()}, synchronize_weights=False)
        connection_info_ref = torch.zeros(1)
        found = collector.cascade_execute(
            "_receiver_schemes['policy']._set_dist_connection_info", connection_info_ref, worker_idx=0
        )
        assert found == "connected"
    finally:
        collector.shutdown()


FRAMES = 600


def test_the_page_fills_replay_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(dataset=str(tmp_path / "data" / "cartpole"), num_envs=4, collection={"totalFrames": FRAMES})
    with cormorant.open_fleet(job, workers=2) as fleet:
        assert fleet.wait_until_done(60)
    first, second = (block for block in blocks("docs/how-to/read-a-dataset.md", "python") if "torchrl" in block)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(first, names)
    dataset, buffer = names["dataset"], names["buffer"]
    assert len(buffer) == len(dataset) == FRAMES
    assert (buffer[:]["observation"] == torch.cat(list(dataset.frames()))["observation"]).all()
    exec(second, names)
    stored = names["buffer"][:]
    for key in (("next", "observation"), ("next", "done"), ("collector", "traj_ids")):
        assert (stored[key] == torch.cat(list(dataset.trajectories()))[key]).all()
    sampled = names["buffer"].sample()["collector", "traj_ids"]
    assert set(sampled.tolist()) <= set(dataset.episodes["traj_id"].to_pylist())


def pendulum() -> Any:
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(DoubleToFloat(), StepCounter(), RewardSum()))


@pytest.mark.parametrize(
    ("kind", "envs"),
    [
        pytest.param(MultiaSyncDataCollector, [pendulum, pendulum], id="rl#2614"),
        pytest.param(SyncDataCollector, partial(ParallelEnv, 2, pendulum), id="rl#2617"),
        pytest.param(aSyncDataCollector, partial(ParallelEnv, 2, pendulum), id="rl#3240"),
    ],
)
def test_collectors_that_are_given_a_buffer_fill_it(kind: Any, envs: Any) -> None:
    """TorchRL's own crash or hang, as these issues tell."""
    layers = nn.Sequential(nn.Linear(3, 1), nn.Tanh())
    policy = TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000), sampler=RandomSampler(), batch_size=32, prefetch=3)
    collector = kind(envs, policy, frames_per_batch=40, total_frames=200, replay_buffer=buffer)
    assert [*collector] == [None] * 5
    assert len(buffer) == 200
    assert buffer.sample().batch_size == (32,)
    collector.shutdown()
