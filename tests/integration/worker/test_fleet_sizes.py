"""Sizes by group, and single slots that are given up, with real processes."""

import pytest
import torch

from cormorant_testing.collecting import make_job, scene
from cormorant_testing.fleets import on_both_engines_slowly, reading
from cormorant_testing.scripts import until
from cormorant_worker.collect.place import spread
from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.local.engine import LocalEngine
from cormorant_worker.fleet.options import FleetOptions


def test_workers_of_all_groups_are_spread_over_devices() -> None:
    class Asked(LocalEngine):
        def device_of(self, device: str, number: int) -> str:
            asked.append((device, number))
            return super().device_of(device, number)

    asked = list[tuple[str, int]]()
    groups = [{"name": "a"}, {"name": "b", "replicas": 1}]
    job = make_job(num_envs=1, lengths=5, workers=2, worker_groups=groups)
    with WorkerFleet(job, FleetOptions(workers=3), engine=Asked()) as fleet:
        assert sorted(asked) == [("cpu", 0), ("cpu", 1), ("cpu", 2)]
        assert [worker.name for worker in fleet.stats().workers if worker.device == "cpu"] == ["a-0", "a-1", "b-0"]
    assert [spread("cuda", number, num_devices=2) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [spread(name, 1, num_devices=count) for name, count in [("cuda", 1), ("cuda:0", 8), ("cpu", 0)]] == [
        "cuda", "cuda:0", "cpu",
    ]  # fmt: skip


@on_both_engines_slowly
@pytest.mark.slow
def test_worker_of_a_given_up_slot_finishes_first() -> None:
    job, checker = scene("counter", step_s=0.002, collection={"mode": "sync"})
    with reading(job, workers=3) as (fleet, reader):

        def names() -> list[tuple[str, int]]:
            return [(worker.name, worker.attempt) for worker in fleet.stats().workers]

        def take() -> int:
            batch = reader.next_batch(timeout=60)
            assert batch is not None
            checker.take(batch)
            return batch.shape[0]

        take()
        with pytest.raises(FleetError, match="there is no worker cpu-7; there are cpu-0, cpu-1, cpu-2"):
            fleet.publish({"weight": torch.zeros(1)}, workers=["cpu-7"])
        with pytest.raises(FleetError, match=r"workers is \[\]; pass a value"):
            reader.publish({"weight": torch.zeros(1)}, workers=[])
        fleet.resize({"cpu": (0, 2)}, wait=False)
        while len(names()) == 3:
            take()
        assert names() == [("cpu-0", 0), ("cpu-2", 0)]
        fleet.resize({"cpu": 2})  # what an operator says again and again: nothing is to be done
        while take() != 4:
            pass
        assert names() == [("cpu-0", 0), ("cpu-2", 0)]
        fleet.resize({"cpu": 3}, wait=False)
        while take() != 6:
            pass
        assert names() == [("cpu-0", 0), ("cpu-1", 1), ("cpu-2", 0)]
        # What ScaleToFit asks for where the pods of some slots have no node.
        fleet.resize({"cpu": (1, 3)}, wait=False)
        while [name for name, _ in names()] != ["cpu-1", "cpu-3"] or take() != 4:
            take()
        fleet.resize({"cpu": 1}, wait=False)
        while take() != 2:
            pass
        until(lambda: names() == [("cpu-1", 1)])
        for wrong, words in (
            ({"cpu": 0}, "a fleet needs at least 1"),
            ({"cpu": -1}, "sizes and indices of worker groups begin at 0; got cpu: -1"),
            ({"gpu": 2}, "there are no worker groups gpu; the manifest has cpu"),
        ):
            with pytest.raises(FleetError, match=words):
                fleet.resize(wrong)
        take()
        stats = fleet.stats()
        assert stats.dropped == {}
        assert stats.restarts == 0
