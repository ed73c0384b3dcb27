"""What only a Ray fleet can get wrong: placement, lost actors and nodes, a full object store, what is left behind.

`test_fleet_exact.py` and `test_fleet_control.py` run on Ray, too.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import ray
import torch

from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.policies import numbered
from cormorant_worker.engine.local import LocalFleet
from cormorant_worker.engine.options import FleetOptions
from cormorant_worker.engine.ray.demand import Demand, demand_of
from cormorant_worker.engine.ray.fleet import RayFleet
from cormorant_worker.engine.ray.options import RayOptions
from cormorant_worker.errors import ControlTimeout, FleetError, ManifestError, WorkerFailed
from cormorant_worker.front import open_fleet

NO_CPUS = RayOptions(num_cpus=0)
"""The cluster of these tests has no CPUs to give."""


def until(what: Callable[[], object], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def balance(fleet: LocalFleet) -> int:
    """Frames stepped that are neither accepted nor dropped."""
    stats = fleet.stats()
    return stats.stepped_frames - stats.frames - sum(stats.dropped.values())


def pids(fleet: LocalFleet) -> list[int]:
    """Of workers that have a process; 0 would be this test's own group."""
    return [worker.pid for worker in fleet.stats().workers if worker.pid]


def test_sync_batches_are_those_of_the_local_fleet_bit_for_bit(ray_cluster: None) -> None:
    options = {"lengths": (3, 1, 7), "ends": "alternate"}
    collection = {"mode": "sync", "totalFrames": 131}
    job = make_job(num_envs=2, policy="counter", collection=collection, **options)
    with LocalFleet(job, FleetOptions(workers=2)) as fleet:
        expected = list(fleet.batches(copy=True))
    with RayFleet(job, FleetOptions(workers=2), NO_CPUS) as fleet:
        found = list(fleet.batches(copy=True))
        assert fleet.stats().frames == 131
        assert balance(fleet) == 0
    assert len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key, value in ours.items(include_nested=True, leaves_only=True):
            assert torch.equal(value, theirs[key]), key
    # A fleet leaves a cluster alone that was there before it.
    assert ray.is_initialized()


def test_killed_actors_are_replaced_with_current_weights_and_no_frame_is_lost_or_doubled(ray_cluster: None) -> None:
    job = make_job(
        num_envs=2,
        policy="versioned",
        action="box",
        collection={"mode": "sync", "totalFrames": 800},
        lengths=(3, 8),
        step_s=0.002,
        run_policy={"maxRestartsPerSlot": 20},
    )
    checker = make_checker(2, action="box", lengths=(3, 8), acts_by_version=True)
    with RayFleet(job, FleetOptions(workers=2), NO_CPUS) as fleet:
        fleet.publish(numbered(1), wait_s=20)
        has_killed = False
        for batch in fleet.batches():
            checker.take(batch)
            if not has_killed and checker.frames >= 200:
                os.kill(pids(fleet)[0], signal.SIGKILL)  # one of two: half of the workers
                fleet.publish(numbered(2))
                has_killed = True
            replacements = [s.version for (a, _), s in checker.streams.items() if a[2] > 0]
            assert min(replacements, default=2) == 2
        stats = fleet.stats()
        assert stats.frames == checker.frames == 800
        assert stats.restarts == 1
        assert balance(fleet) == 0
        assert {worker.attempt for worker in stats.workers} | {0, 1} == {0, 1}
    assert len(checker.attempts) == 3


def test_an_actor_that_nobody_can_place_fails_with_what_it_asked_for(ray_cluster: None) -> None:
    options = FleetOptions(workers=1, startup_timeout_s=2.0)
    words = (
        r"it asks for CPU: 1, GPU: 3, slot:cpu-0: 1, walrus: 2; Ray has 1 living node with .*"
        if torch.cuda.is_available()
        else r"it asks for CPU: 1, GPU: 3, slot:cpu-0: 1, walrus: 2; Ray has 1 living node with nothing"
    )
    demand = RayOptions(num_cpus=1, num_gpus=3, resources={"walrus": 2}, slot_resources=True)
    with pytest.raises((WorkerFailed, ControlTimeout), match=words):
        RayFleet(make_job(num_envs=2, lengths=3), options, demand)


def test_a_batch_that_the_object_store_cannot_hold_is_refused_with_figures(ray_cluster: None) -> None:
    job = make_job(num_envs=2, lengths=3, collection={"framesPerBatch": 4_000_000})
    with pytest.raises(
        FleetError, match=r"object store has 209,715,200 bytes on a node, a batch takes up to [\d,]+ and"
    ):
        RayFleet(job, FleetOptions(workers=1), NO_CPUS)


@pytest.mark.slow
def test_a_full_object_store_makes_workers_wait_and_loses_nothing(ray_cluster: None) -> None:
    # Batches of up to 15 MB. The queue and the worker would hold 22 of them, the store has room for half as many.
    job = make_job(
        env={"envpool": {"taskId": "CartPole-v1", "numEnvs": 64, "numThreads": 1}},
        collection={"framesPerBatch": 192_000, "totalFrames": 4_000_000},
        queue={"capacityBatches": 20},
    )
    with RayFleet(job, FleetOptions(workers=1), NO_CPUS) as fleet:
        slots = fleet._deliveries.slots
        assert slots.limit * fleet.layout.size_bytes <= 200 << 20
        assert slots.limit < 20
        until(lambda: not slots.room)
        before = fleet.stats().stepped_frames
        assert before <= slots.limit * 192_000
        frames = sum(batch.numel() for batch in fleet.batches())
        assert frames == fleet.stats().frames == 4_000_000
        assert balance(fleet) == 0


@pytest.mark.slow
def test_a_stopped_actor_is_found_out_and_killed(ray_cluster: None) -> None:
    job = make_job(num_envs=2, lengths=4, step_s=0.002, collection={"totalFrames": 2000})
    checker = make_checker(2, lengths=4, versions=False)
    with RayFleet(job, FleetOptions(workers=2, hang_timeout_s=3.0), NO_CPUS) as fleet:
        for batch in fleet.batches():
            checker.take(batch)
            if checker.batches == 3:
                pid = pids(fleet)[0]
                os.kill(pid, signal.SIGSTOP)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        assert checker.frames == fleet.stats().frames == 2000
        assert fleet.stats().restarts == 1
        assert balance(fleet) == 0


TWO_NODES = """
import json, os, signal, subprocess, sys
import ray
from ray.cluster_utils import Cluster
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.policies import numbered
from cormorant_worker.engine.options import FleetOptions
from cormorant_worker.engine.ray.fleet import RayFleet
from cormorant_worker.engine.ray.options import RayOptions

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "resources": {"slot:cpu-0": 1},
    "object_store_memory": 100 << 20, "include_dashboard": False})
second = cluster.add_node(num_cpus=0, resources={"slot:cpu-1": 1}, object_store_memory=100 << 20)
job = make_job(num_envs=2, policy="versioned", action="box", lengths=(3, 8), step_s=0.002,
               collection={"mode": sys.argv[1], "totalFrames": 2000}, run_policy={"maxRestartsPerSlot": 20})
checker = make_checker(2, action="box", lengths=(3, 8), acts_by_version=True)
options = RayOptions(address=cluster.address, slot_resources=True)
with RayFleet(job, FleetOptions(workers=2), options) as fleet:
    fleet.publish(numbered(1), wait_s=30)
    for batch in fleet.batches():
        checker.take(batch)
        if second is not None and checker.frames > 400:
            os.kill(second.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            second = None
            fleet.publish(numbered(2))
            third = cluster.add_node(num_cpus=0, resources={"slot:cpu-1": 1}, object_store_memory=100 << 20)
    stats = fleet.stats()
    late = [s.version for (a, _), s in checker.streams.items() if a[2] > 0]
    print(json.dumps({
        "frames": checker.frames, "accepted": stats.frames, "restarts": stats.restarts,
        "balance": stats.stepped_frames - stats.frames - sum(stats.dropped.values()),
        "attempts": sorted(checker.attempts), "oldest_of_replacements": min(late, default=2),
    }), flush=True)
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(260)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_node_that_dies_takes_no_frame_with_it(mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_NODES, mode], env=script_environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.pop("restarts") >= 1
    replacements = [attempt for attempt in told.pop("attempts") if attempt[1] == 1 and attempt[2] > 0]
    # In async mode the other worker may have collected the rest before anybody came.
    assert replacements or mode == "async"
    assert told == {"frames": 2000, "accepted": 2000, "balance": 0, "oldest_of_replacements": 2}


ENDLESS = """
import sys
from cormorant_testing.collecting import make_checker, make_job
from cormorant_worker.front import open_fleet

checker = make_checker(2, lengths=5, versions=False)
with open_fleet(make_job(num_envs=2, lengths=5), workers=1, engine="ray") as fleet:
    print(fleet.stats().workers[0].pid, flush=True)
    for _ in range(30):
        checker.take(fleet.take().tensordict)
    assert fleet.stats().total_frames is None
    print("collected", flush=True)
"""


def script_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def of_session(session: int) -> list[psutil.Process]:
    """Processes that a script started, wherever they have moved to in the tree; zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def test_a_cluster_of_its_own_collects_for_ever_and_ends_with_the_fleet() -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        env=script_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = script.communicate(timeout=110)
    lines = [line for line in out.splitlines() if "worker_ready" not in line]
    assert lines[1:] == ["collected"], out + err[-3000:]
    assert script.returncode == 0, err[-3000:]
    until(lambda: not psutil.pid_exists(int(lines[0])), seconds=20)
    until(lambda: not of_session(script.pid), seconds=20)


@pytest.mark.slow
def test_no_process_is_left_when_the_fleets_own_is_killed() -> None:
    waits = ENDLESS.replace('print("collected", flush=True)', "import time; time.sleep(100)")
    script = subprocess.Popen(
        [sys.executable, "-c", waits],
        env=script_environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert script.stdout is not None
    worker = next(int(line) for line in script.stdout if line.strip().isdecimal())
    script.kill()
    script.communicate(timeout=30)
    until(lambda: not psutil.pid_exists(worker), seconds=40)
    until(lambda: not of_session(script.pid), seconds=40)


def job_with(resources: dict, **group: object) -> object:
    document = make_job(num_envs=2, lengths=3).to_document()
    document["spec"]["workerGroups"] = [{"name": "cpu", "resources": resources, **group}]
    from cormorant_worker.front import load_job

    return load_job(document)


@pytest.mark.parametrize(
    ("resources", "options", "is_own", "expected"),
    [
        ({}, {}, False, Demand(num_cpus=1, num_gpus=0)),
        ({}, {}, True, Demand(num_cpus=0, num_gpus=0)),
        ({"requests": {"cpu": "1500m"}, "limits": {"cpu": 4}}, {}, False, Demand(num_cpus=1.5, num_gpus=0)),
        ({"limits": {"cpu": "2", "nvidia.com/gpu": 1}}, {}, False, Demand(num_cpus=2, num_gpus=1)),
        ({"limits": {"cpu": "2"}}, {"num_cpus": 0.5, "num_gpus": 0.25}, False, Demand(num_cpus=0.5, num_gpus=0.25)),
        ({}, {"slot_resources": True}, False, Demand(num_cpus=0, num_gpus=0, resources={"slot:cpu-3": 1.0})),
        ({}, {"resources": {"walrus": 2}}, False, Demand(num_cpus=1, num_gpus=0, resources={"walrus": 2})),
    ],
)
def test_a_worker_asks_for_what_its_group_says(resources: dict, options: dict, is_own: bool, expected: Demand) -> None:
    assert demand_of(job_with(resources), "cpu", 3, RayOptions(**options), is_own=is_own) == expected


def test_gpu_groups_ask_for_one_and_odd_quantities_are_refused() -> None:
    gpu = job_with({}, device="gpu")
    assert demand_of(gpu, "cpu", 0, RayOptions(), is_own=True) == Demand(num_cpus=0, num_gpus=1)
    assert demand_of(gpu, "cpu", 0, RayOptions(), is_own=True, device="cpu") == Demand(num_cpus=0, num_gpus=0)
    with pytest.raises(ManifestError, match=r'resources.requests\["cpu"\] is \'lots\'; write a number as 2, "0.5"'):
        demand_of(job_with({"requests": {"cpu": "lots"}}), "cpu", 0, RayOptions(), is_own=False)


def test_a_cluster_that_is_not_there_is_named_at_once() -> None:
    job = make_job(num_envs=2, lengths=3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(FleetError, match=f'nothing answers at the Ray address "127.0.0.1:{port}"'):
        RayFleet(job, FleetOptions(workers=1), RayOptions(address=f"127.0.0.1:{port}"))
    with pytest.raises(FleetError, match='"ray://somewhere:10001" is neither "auto" nor host:port'):
        RayFleet(job, FleetOptions(workers=1), RayOptions(address="ray://somewhere:10001"))


def test_options_of_ray_without_ray_are_refused() -> None:
    with pytest.raises(FleetError, match='add engine="ray"'):
        open_fleet(make_job(num_envs=2), ray=RayOptions())
