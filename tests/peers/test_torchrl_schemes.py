"""TorchRL's own weight schemes deliver to our RayCollector, as to TorchRL's. Skipped where TorchRL is not installed."""

import copy
import time

import pytest
import torch

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs these tests")

from cormorant_compat.torchrl import RayCollector
from cormorant_testing.envs import CountingEnv
from cormorant_testing.policies import Versioned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def test_a_scheme_of_torchrls_delivers_to_our_collector() -> None:
    from tensordict import TensorDict
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
        deadline = time.monotonic() + 60
        while collector.stats()["policy_version"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while (batch := collector.next())["collector", "policy_version"].min() < 2:
            assert time.monotonic() < deadline
        # The number in each action is that of the weights.
        assert (batch["action"][..., 0] == 2).all()
        assert collector.stats()["policy_version"] == 2
