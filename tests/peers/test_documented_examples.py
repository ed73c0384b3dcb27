"""The examples in the documentation of what we are compatible with, verbatim but for their imports and sizes.

`docs/reference/compatibility.md` lists the documents. Two examples read a name that they do not define: it is defined
here before them, and nothing else is changed.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs these tests")

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from cormorant_compat.torchrl import RayCollector
from cormorant_testing.envs import CountingEnv
from cormorant_testing.scripts import run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

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
