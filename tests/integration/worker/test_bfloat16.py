"""`collection.bfloat16`: learners get the bits that the policy computed, on every way to them."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDictBase

from cormorant import make_collector
from cormorant_client import connect
from cormorant_contract.job import CollectorJob
from cormorant_testing.collecting import make_job
from cormorant_testing.fleets import make_fleet
from cormorant_testing.serving import serve
from cormorant_worker.errors import ManifestError, WorkerFailed
from cormorant_worker.local_fleet import LocalFleet

pytestmark = pytest.mark.usefixtures("engine")


def job_of(*keys: str, **collection: object) -> CollectorJob:
    asked = {"framesPerBatch": 12, "totalFrames": 48, **({"bfloat16": list(keys)} if keys else {}), **collection}
    return make_job(num_envs=2, policy="cormorant_testing.recurrent:InHalf", lengths=(3, 8), collection=asked)


def check(batch: TensorDictBase) -> None:
    """All of it is what the policy computed, in its dtype and bit by bit."""
    step = batch["observation"][..., 2:3]
    thirds = step.bfloat16() / 3
    assert batch["value"].dtype == torch.float32
    assert torch.equal(batch["value"], step / 3)
    for found, computed in (
        (batch["logits"], torch.cat([thirds, -thirds], -1)),
        (batch["next", "hidden"], batch["hidden"] + thirds),
        (batch["hidden"][batch["is_init"]], torch.full_like(batch["hidden"][batch["is_init"]], 0.1)),
    ):
        assert found.dtype == computed.dtype == torch.bfloat16
        assert torch.equal(found.view(torch.int16), computed.view(torch.int16))


@pytest.mark.parametrize(
    "engine", ["local", "local-served", pytest.param("ray", marks=pytest.mark.slow)], indirect=True
)
def test_a_fleet_gives_bfloat16_bit_for_bit(engine: str) -> None:
    with make_fleet(job_of("logits", "hidden", mode="sync"), workers=2) as fleet:
        batches = list(LocalFleet(fleet).batches())
    assert sum(batch.numel() for batch in batches) == 48
    for batch in batches:
        check(batch)


@pytest.mark.parametrize("memory", ["auto", "never"])
def test_a_head_gives_bfloat16_bit_for_bit(tmp_path: Path, memory: str) -> None:
    with serve(job_of("logits", "hidden"), directory=tmp_path / "head", workers=1) as served:
        client = connect(served.server.url, token=served.data.token)
        frames = 0
        for batch in client.deliveries(memory=memory):
            assert str(batch.numpy()["logits"].dtype) == "float32"
            check(batch.tensordict())
            frames += batch.num_frames
        assert frames == 48


def test_a_collector_of_this_process_gives_bfloat16() -> None:
    with make_collector(job_of("logits", "hidden")) as collector:
        check(collector.collect(num_steps=20))
    with make_collector(job_of()) as collector:
        assert collector.collect(num_steps=20)["logits"].dtype == torch.float32


def test_an_output_that_the_policy_does_not_write_is_refused_before_the_first_frame() -> None:
    with pytest.raises(WorkerFailed, match='the policy writes no "logit"; did you mean logits'):
        make_fleet(job_of("logit"), workers=1)
    with pytest.raises(ManifestError, match='the policy writes no "x"; it writes logits, value, hidden'):
        make_collector(job_of("x"))


def test_an_output_that_bfloat16_would_round_is_refused_with_the_value() -> None:
    with (
        make_collector(job_of("value")) as collector,
        pytest.raises(
            ValueError,
            match=r"value holds 0\.333\d+, which bfloat16 would round to 0\.333\d+: the policy did not compute",
        ),
    ):
        collector.collect(num_steps=20)
