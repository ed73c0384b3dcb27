"""What only a Ray fleet can get wrong: placement, lost actors and nodes, a full object store, what is left behind.

`test_fleet_exact.py` and `test_fleet_control.py` run on Ray, too.
"""

import textwrap

import pytest
import ray

from cormorant_testing.collecting import assert_same, make_job
from cormorant_testing.fleets import balance
from cormorant_testing.scripts import run_script, until, unused_port
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import ControlTimeout, FleetError, WorkerFailed
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions, RayOptions
from cormorant_worker.fleet.ray.cluster import RayCluster
from cormorant_worker.fleet.ray.engine import RayEngine, actor_options
from cormorant_worker.local_fleet import LocalFleet

NO_CPUS = RayOptions(num_cpus=0)
"""The cluster of these tests has no CPUs to give."""


def test_sync_batches_are_those_of_the_local_fleet_bit_for_bit(ray_cluster: None) -> None:
    job = make_job(
        policy="counter", lengths=(3, 1, 7), ends="alternate", collection={"mode": "sync", "totalFrames": 131}
    )
    with WorkerFleet(job, FleetOptions(workers=2)) as fleet:
        expected = list(LocalFleet(fleet).batches(copy=True))
    with WorkerFleet(job, FleetOptions(workers=2), engine=RayEngine(NO_CPUS)) as fleet:
        found = list(LocalFleet(fleet).batches(copy=True))
        assert fleet.stats().frames == 131
        assert balance(fleet) == 0
    assert len(found) == 4
    assert_same(found, expected)
    # A fleet leaves a cluster alone that was there before it.
    assert ray.is_initialized()


def test_the_next_batch_is_collected_while_the_last_is_consumed(ray_cluster: None) -> None:
    job = make_job(queue={"capacityBatches": 1})
    with WorkerFleet(job, FleetOptions(workers=1), engine=RayEngine(NO_CPUS)) as fleet:
        reader = LocalFleet(fleet)
        for frames in range(40, 200, 20):
            assert reader.next_batch() is not None
            until(lambda n=frames: fleet.stats().stepped_frames >= n, what="all steps of the next one are made")


def test_unplaceable_actor_fails_with_its_request(ray_cluster: None) -> None:
    options = FleetOptions(workers=1, startup_timeout_s=2.0)
    words = "cpu-0 is not placed: it asks Ray for CPU 1, GPU 3, walrus 2"
    demand = RayOptions(num_cpus=1, num_gpus=3, resources={"walrus": 2})
    with pytest.raises((WorkerFailed, ControlTimeout), match=words):
        WorkerFleet(make_job(num_envs=2, lengths=3), options, engine=RayEngine(demand))


@pytest.mark.parametrize(
    ("resources", "options", "is_own", "expected"),
    [
        ({}, {}, False, (1, 0, {})),
        ({}, {}, True, (0, 0, {})),
        ({"requests": {"cpu": "1500m"}, "limits": {"cpu": 4}}, {}, False, (1.5, 0, {})),
        ({"limits": {"cpu": "2", "nvidia.com/gpu": 1}}, {}, False, (2, 1, {})),
        ({"limits": {"cpu": "2"}}, {"num_cpus": 0.5, "num_gpus": 0.25}, False, (0.5, 0.25, {})),
        ({"limits": {"cpu": "2", "nvidia.com/gpu": 1}}, {"slot_resources": True}, False, (0, 0, {"slot:cpu-0": 1.0})),
        ({}, {"resources": {"walrus": 2}, "actors": [{"num_cpus": 3, "resources": {"seal": 1}}]}, False,
         (3, 0, {"walrus": 2, "seal": 1})),
        ({}, {"actors": [{"num_cpus": 3, "num_gpus": 1}]}, True, (0, 1, {})),
    ],
)  # fmt: skip
def test_a_worker_asks_for_what_its_group_says(resources: dict, options: dict, is_own: bool, expected: tuple) -> None:
    job = make_job(num_envs=2, lengths=3, worker_groups=[{"name": "cpu", "resources": resources}])
    asked = actor_options(job, WorkerPlace(group="cpu"), RayOptions(**options), is_own=is_own)
    assert (asked["num_cpus"], asked["num_gpus"], asked["resources"]) == expected
    asked = actor_options(job, WorkerPlace(group="cpu", device="cuda"), RayOptions(), is_own=is_own)
    assert asked["num_gpus"] == 1


def test_a_cluster_that_is_not_there_is_named_at_once() -> None:
    job = make_job(num_envs=2, lengths=3)
    port = unused_port()
    with pytest.raises(FleetError, match=f'nothing answers at the Ray address "127.0.0.1:{port}".*`ray start --head`'):
        WorkerFleet(job, FleetOptions(workers=1), engine=RayEngine(RayOptions(address=f"127.0.0.1:{port}")))
    with pytest.raises(FleetError, match=r'at the Ray address "ray://somewhere:ten" .*; give "auto", or host:port'):
        WorkerFleet(job, FleetOptions(workers=1), engine=RayEngine(RayOptions(address="ray://somewhere:ten")))


@pytest.mark.slow
def test_ray_aborts_no_process_whose_head_is_slow() -> None:
    script = """
import signal, time
from cormorant_worker.fleet.ray.cluster import signals_kept
with signals_kept():
    signal.alarm(3)  # as Ray's handler of SIGTERM does; Python's runs once Ray's head has answered
    while signal.getitimer(signal.ITIMER_REAL)[0]:
        time.sleep(0.01)
"""
    assert run_script(script).returncode == 0


def test_two_fleets_share_one_ray_cluster() -> None:
    # In a process of its own: this one's tests have a cluster.
    code = """
        import ray
        from cormorant_testing.collecting import make_job
        from cormorant_worker.fleet.fleet import WorkerFleet
        from cormorant_worker.fleet.options import FleetOptions, RayOptions
        from cormorant_worker.fleet.ray.engine import RayEngine
        job, options = make_job(num_envs=2, lengths=5), RayOptions(init={"object_store_memory": 100 << 20})
        first = WorkerFleet(job, FleetOptions(workers=1), engine=RayEngine(options))
        second = WorkerFleet(job, FleetOptions(workers=1), engine=RayEngine(options))
        assert first.borrow(timeout_s=60) is not None
        first.close()
        assert ray.is_initialized()
        assert second.borrow(timeout_s=60) is not None
        assert second.borrow(timeout_s=60) is not None
        second.close()
        second.close()
        assert not ray.is_initialized()
        print("both collected")
    """
    done = run_script(textwrap.dedent(code))
    assert done.stdout.strip().endswith("both collected"), done.stderr[-2000:]


def test_ray_that_does_not_start_in_time_is_a_fleet_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002  # as Ray itself does

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(FleetError, match="cannot start a Ray cluster on this machine: The current node timed out"):
        RayCluster.__new__(RayCluster)._connect(RayOptions())  # this process may have a cluster
