"""One learner, three places: a script that keeps to `cormorant.Fleet` runs on workers of this machine, on Ray, and over
REST, and gets the same batches.
"""

import gc
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save

import cormorant
from cormorant import errors
from cormorant.policies import mlp
from cormorant_testing.collecting import assert_same, make_job
from cormorant_testing.scripts import until
from cormorant_testing.serving import serve
from manifest_making import collector_job

CARTPOLE = collector_job("one-learner", {
        "env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4, "numThreads": 1}},
        "policy": {"entrypoint": "cormorant.policies:mlp", "explorationType": "mode"},
        "collection": {
            "framesPerBatch": 40, "totalFrames": 280, "seed": 5,
            "weights": {"maxStaleness": 0}, "normalize": {"observation": {}},
        },
        "output": {"queue": {"capacityBatches": 1}},
    })  # fmt: skip


def local(folder: Path) -> Any:
    return cormorant.open_fleet(CARTPOLE, workers=1)


def on_ray(folder: Path) -> Any:
    return cormorant.open_fleet(CARTPOLE, workers=1, engine=cormorant.RayOptions(num_cpus=0))


@contextmanager
def over_rest(folder: Path) -> Iterator[cormorant.Fleet]:
    with (
        serve(cormorant.load_job(CARTPOLE), directory=folder / "head") as served,
        cormorant.connect(served.server.url, token=served.writer.token) as fleet,
    ):
        yield fleet


PLACES = [local, pytest.param(on_ray, marks=pytest.mark.slow), over_rest]


def learn(fleet: cormorant.Fleet, folder: Path) -> list[Any]:
    """Read every batch but what a saved state brings back; publish after each. Returns what the batches were."""
    torch.manual_seed(0)
    policy = mlp(*fleet.spaces)
    seen: list[Any] = []

    def learned(batch: Any) -> None:
        assert batch["collector", "policy_version"].unique().tolist() == [len(seen)], "the newest, each time"
        assert fleet.statistics is not None
        acted_with = fleet.statistics[len(seen)]
        assert acted_with["observation"]["count"] == 40 * max(0, len(seen) - 1), "acknowledged when it was published"
        seen.append((batch.clone(), acted_with))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(-1.1)
        receipt = fleet.publish({"policy": policy.state_dict()}).wait(30)
        if len(seen) == 1:  # a worker ends with the last batch
            assert (receipt.version, receipt.applied, receipt.waiting, receipt.refused) == (1, ("cpu-0",), (), {})

    # The first batch is from the initial weights: whether a publish before it overtakes one would depend on the moment.
    with fleet.batches() as batches:
        for batch in islice(batches, 3):
            learned(batch)
        assert batches.num_frames == 120
    with fleet.pause():
        assert fleet.stats().is_paused
        assert fleet.stats().ready_workers == 1
        fleet.save(folder / "state")
    fleet.resume()
    while (own := fleet.next_batch(timeout=60, copy=True)) is not None:
        learned(own)
    stats = fleet.stats()
    assert (stats.frames, stats.total_frames, stats.version) == (280, 280, fleet.version)
    assert fleet.version == 7
    assert stats.episodes > 0
    assert stats.mean_return is not None
    return seen


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("alone")
    with local(folder) as fleet:
        return learn(fleet, folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", PLACES)
def test_the_same_script_reads_the_same_batches(place: Any, alone: list[Any], tmp_path: Path) -> None:
    with place(tmp_path) as fleet:
        assert isinstance(fleet, cormorant.Fleet)
        found = learn(fleet, tmp_path)
    assert [batch.shape for batch, _ in found] == [(4, 10)] * 7
    assert [acted_with for _, acted_with in found] == [acted_with for _, acted_with in alone]
    assert_same([batch for batch, _ in found], [batch for batch, _ in alone], but=[("collector", "traj_ids")])


def test_a_fleet_goes_on_from_a_file(tmp_path: Path) -> None:
    job = make_job(num_envs=2, lengths=(3, 5), collection={"framesPerBatch": 20, "totalFrames": 140}, queue={})
    with cormorant.open_fleet(job, workers=1) as fleet:
        fleet.next_batch()
        with fleet.pause():
            fleet.save(tmp_path / "state")
            queued = fleet.stats().queued_batches
    with cormorant.open_fleet(job, workers=1, resume=tmp_path / "state") as fleet:
        rest = sum(1 for _ in fleet.batches())
        assert rest == 6 - queued, "what waits in the queue is counted, and not saved"
        assert fleet.stats().dropped == {}, "it collects nothing before it has the state"
    with pytest.raises(errors.StateError, match=r"cannot read the state in .*: No such file"):
        cormorant.open_fleet(job, workers=1, resume=tmp_path / "nothing")


def test_a_shard_that_was_left_holds_up_no_other(tmp_path: Path) -> None:
    """With maxStaleness 0 a batch that is held stops the fleet."""
    with local(tmp_path) as fleet:
        assert fleet.next_batch() is not None
        shards = fleet.streaming_split(2)
        for _ in shards[0].iter_batches():
            break
        assert sum(1 for _ in shards[1].iter_batches()) == 5


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_no_other_process_reads_a_local_fleet(tmp_path: Path) -> None:
    """A fork has a copy of the queue, whose batches would be read twice."""
    with local(tmp_path) as fleet:
        shards = fleet.streaming_split(2)
        for thing in (fleet, shards[0]):
            with pytest.raises(errors.FleetError, match="belongs to the process that opened it"):
                pickle.dumps(thing)
        if not (child := os.fork()):
            refused = 0
            try:
                for call in (fleet.next_batch, fleet.stats, lambda: next(shards[0].iter_batches())):
                    with pytest.raises(errors.FleetError, match="belongs to the process that opened it"):
                        call()
                    refused += 1
                fleet.close()
            finally:
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert fleet.next_batch(timeout=60) is not None


def test_copies_of_two_threads_are_whole(tmp_path: Path) -> None:
    """A thread that asks for the next batch gives back none that another one is copying."""
    job = make_job(num_envs=2, lengths=(3, 5), collection={"framesPerBatch": 20, "totalFrames": 8000}, queue={})

    def read(fleet: cormorant.Fleet) -> int:
        return sum(batch.numel() for batch in iter(lambda: fleet.next_batch(copy=True), None))

    with cormorant.open_fleet(job, workers=1) as fleet, ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(read, [fleet] * 4)) == 8000


@pytest.mark.parametrize("place", [local, over_rest])
def test_a_state_file_that_cannot_be_used_is_said_in_a_sentence(place: Any, tmp_path: Path) -> None:
    with place(tmp_path) as fleet:
        with pytest.raises(errors.StateError, match=r"cannot write the state to .*/no/file: No such file"):
            fleet.save(tmp_path / "no" / "file")
        for other in (tmp_path, tmp_path / "nothing", "nul\0"):
            with pytest.raises(errors.StateError, match="cannot read the state in"):
                fleet.restore(other)
        with pytest.raises(errors.StateError, match="a NoneType is not a state"):
            fleet.restore(None)
        fleet.save(tmp_path / "state")
        assert not [*tmp_path.glob("*.part"), *tmp_path.glob(".state*")]
        fleet.restore(tmp_path / "state")


def test_workers_end_with_the_last_reference_to_their_fleet() -> None:
    """Also when the garbage collector finds it in a thread that holds the fleet's condition and that of all threads."""
    fleet = cormorant.open_fleet(CARTPOLE, workers=1)
    (worker,) = (psutil.Process(worker.pid) for worker in fleet.workers())
    inner, batches = fleet._fleet, fleet.batches()
    del fleet
    if (child := os.fork()) == 0:
        del batches
        os._exit(0)
    os.waitpid(child, 0)
    assert next(batches).shape == (4, 10), "an iteration refers to its fleet"
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    with inner._changed, threading._active_limbo_lock:  # type: ignore[attr-defined]  # where a thread starts
        del batches, cycle
        gc.collect()
    worker.wait(60)


@pytest.mark.parametrize("place", [local, over_rest])
def test_every_fleet_refuses_in_the_same_words(place: Any, tmp_path: Path) -> None:
    other = make_job(num_envs=2, lengths=(3, 5), collection={"framesPerBatch": 20}, queue={})
    with cormorant.open_fleet(other, workers=1) as fleet:
        fleet.save(tmp_path / "other")
    with place(tmp_path) as fleet:
        policy = mlp(*fleet.spaces)
        fleet.publish(policy, version=3)
        cut, bad = policy.state_dict(), policy.state_dict()
        del cut[next(iter(cut))]
        bad = {name: torch.full_like(value, torch.nan) for name, value in bad.items()}
        (tmp_path / "pickle.pt").write_bytes(b"\x80\x02abcdefgh")
        with pytest.raises(errors.WeightsMismatch, match="do not fit the policy") as mismatch:
            fleet.publish(cut)
        assert len(mismatch.value.differences["missing"]) == 1
        with pytest.raises(errors.WeightsMismatch, match="do not fit the policy"):
            fleet.publish({"nobody": policy})
        with pytest.raises(errors.NonfiniteWeights, match="NaN or infinite values"):
            fleet.publish(bad)
        with pytest.raises(errors.StaleWeights, match="version 2 is not newer than 3"):
            fleet.publish(policy, version=2)
        for weights, words in (
            (None, "a NoneType is not weights; pass a torch module"),
            (7, "a int is not weights"),
            ({}, "nothing to publish: the state dict is empty"),
            ({"bias": "text"}, '"bias" is of type str, not a tensor'),
            ({"bias": np.array([None])}, 'tensor "bias" has dtype object'),
            ("nothing.safetensors", r"cannot read nothing\.safetensors: No such file"),
            (tmp_path, "cannot read .*: Is a directory"),
            ("nul\0", "cannot read nul.*: embedded null byte"),
            (b"", "the weights are not safetensors"),
            (tmp_path / "pickle.pt", r"the weights in .*pickle\.pt are a pickle"),
        ):
            with pytest.raises(errors.WeightsError, match=words):
                fleet.publish(weights)
        for state in (tmp_path / "other", b"text"):
            with pytest.raises(errors.StateError):
                fleet.restore(state)
        for seed in (-1, 1.5, "7"):
            with pytest.raises((TypeError, errors.FleetError)):
                fleet.seed(seed)  # type: ignore[arg-type]  # as a script may
        with pytest.raises((TypeError, errors.ClientError)):
            fleet.publish(policy, version=4.5)  # type: ignore[arg-type]  # as a script may
        assert fleet.version == 3
        with fleet.pause(), pytest.raises(errors.BatchTimeout, match=r"no batch came .*within 0\.2 s"):
            sum(batch.numel() for batch in iter(lambda: fleet.next_batch(timeout=0.2), None))
    for call in (fleet.next_batch, fleet.state, lambda: fleet.publish(policy), lambda: next(fleet.batches())):
        with pytest.raises(errors.FleetClosed, match=" closed"):
            call()


def test_every_fleet_says_that_a_worker_does_not_pause(tmp_path: Path) -> None:
    job = make_job(num_envs=1, lengths=(3, 5), step_s=5.0, collection={"framesPerBatch": 20}, queue={})
    with cormorant.open_fleet(
        job, workers=1, options=cormorant.FleetOptions(control_timeout_s=0.1, drain_timeout_s=0.1)
    ) as fleet:
        until(lambda: [worker.phase for worker in fleet.workers()] == ["stepping"])
        with pytest.raises(errors.ControlTimeout, match=r"cpu-0 did not pause within 0 s"):
            fleet.pause()
    with (
        serve(job, directory=tmp_path) as served,
        cormorant.connect(served.server.url, token=served.writer.token) as far,
    ):
        until(lambda: [worker.phase for worker in far.workers().workers] == ["stepping"])
        with pytest.raises(errors.ControlTimeout, match=r"still draining after 0\.1 s; .* holds its pause for 60 s"):
            far.pause(wait=0.1)


@pytest.mark.parametrize("place", [local, over_rest])
def test_every_fleet_publishes_the_same_things(place: Any, tmp_path: Path) -> None:
    with place(tmp_path) as fleet:
        policy = mlp(*fleet.spaces)
        file = save(policy.state_dict())
        (tmp_path / "policy.safetensors").write_bytes(file)
        arrays = {name: value.numpy() for name, value in policy.state_dict().items()}
        given = [policy, policy.state_dict(), arrays, {"policy": policy}, {"policy": arrays}, file, bytearray(file)]
        given += [memoryview(file), tmp_path / "policy.safetensors", str(tmp_path / "policy.safetensors")]
        for version, weights in enumerate(given, start=1):
            assert fleet.publish(weights, wait=30).version == version
