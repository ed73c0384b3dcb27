"""Fleets on Ray clusters of several nodes, with tokens, and on clusters that fall apart.

A process can be connected to one cluster only: each test runs scripts of its own.
"""

import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cormorant_testing.scripts import environment, of_session, start_script, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IMPORTS = """
import json, os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import ray
from ray.cluster_utils import Cluster
from cormorant_testing.collecting import make_checker, make_job, scene
from cormorant_testing.fleets import balance
from cormorant_testing.policies import numbered
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions, RayOptions
from cormorant_worker.fleet.ray.engine import RayEngine
from cormorant_worker.errors import CormorantError
from cormorant_worker.launch import load_job
from cormorant_worker.local_fleet import LocalFleet

STORE = {"object_store_memory": 100 << 20}

def make_cluster(**head):
    return Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **STORE, **head})

def versioned(**collection):
    return scene("versioned", step_s=0.002, collection=collection, run_policy={"maxRestartsPerSlot": 20})

def told(fleet, checker, **more):
    stats = fleet.stats()
    print(json.dumps({
        "frames": checker.frames, "accepted": stats.frames, "restarts": stats.restarts, "dropped": stats.dropped,
        "balance": balance(fleet), "attempts": sorted(checker.attempts), **more,
    }), flush=True)
"""


def run(script: str, *arguments: str, timeout_s: float = 240, **more: str) -> dict[str, Any]:
    """What a script says in its last line of JSON; it leaves no process."""
    process = start_script(IMPORTS + textwrap.dedent(script), *arguments, **more)
    try:
        out, err = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, out[-1000:] + err[-3000:]
        until(lambda: not of_session(process.pid), seconds=30)
        told: dict[str, Any] = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
        return told
    finally:
        process.kill()
        for left in of_session(process.pid):
            left.kill()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_node_that_dies_takes_no_frame_with_it(mode: str) -> None:
    told = run(
        """
        cluster = make_cluster(resources={"slot:cpu-0": 1})
        second = cluster.add_node(num_cpus=0, resources={"slot:cpu-1": 1}, **STORE)
        job, checker = versioned(mode=sys.argv[1], totalFrames=2000)
        options = RayOptions(address=cluster.address, slot_resources=True)
        with WorkerFleet(job, FleetOptions(workers=2), engine=RayEngine(options)) as fleet:
            fleet.publish(numbered(1), wait_s=30)
            for batch in LocalFleet(fleet).batches():
                checker.take(batch)
                if second is not None and checker.frames > 400:
                    os.kill(second.all_processes["raylet"][0].process.pid, signal.SIGKILL)
                    second = None
                    fleet.publish(numbered(2))
                    third = cluster.add_node(num_cpus=0, resources={"slot:cpu-1": 1}, **STORE)
            late = [s.version for (a, _), s in checker.streams.items() if a[2] > 0]
            told(fleet, checker, oldest_of_replacements=min(late, default=2))
        cluster.shutdown()
        """,
        mode,
    )
    assert told.pop("restarts") >= 1
    replacements = [attempt for attempt in told.pop("attempts") if attempt[1] == 1 and attempt[2] > 0]
    # In async mode the other worker may have collected the rest before anybody came.
    assert replacements or mode == "async"
    assert set(told.pop("dropped")) <= {"crash"}
    assert told == {"frames": 2000, "accepted": 2000, "balance": 0, "oldest_of_replacements": 2}


def test_workers_are_spread_over_nodes_with_their_code(tmp_path: Path) -> None:
    (tmp_path / "sent_along.py").write_text(
        "import os\n"
        "from cormorant_testing.envs import CountingEnv\n"
        "def make():\n"
        "    return CountingEnv(lengths=int(os.environ['LENGTH']))\n"
    )
    told = run(
        """
        cluster = make_cluster(num_cpus=2)
        cluster.add_node(num_cpus=2, **STORE)
        def places(fleet):
            members = sorted(fleet._core.slots.workers, key=lambda member: member.slot.key)
            return [member.connection._node_id for member in members]

        document = make_job(num_envs=2, lengths=4).to_document()
        env = {"entrypoint": "sent_along:make", "vectorization": "inline", "numEnvs": 2}
        group = {"name": "main", "resources": {"requests": {"cpu": 1}}}
        document["spec"] |= {"env": {"gymnasium": env}, "workerGroups": [group], "replicas": 2}
        sent = {"working_dir": sys.argv[1], "env_vars": {"LENGTH": "4"}}
        checker = make_checker(2, lengths=4, versions=False)
        spread = [{"scheduling_strategy": "SPREAD"}] * 2
        spreading = RayOptions(address=cluster.address, actors=spread, runtime_env=sent)
        with WorkerFleet(load_job(document), None, engine=RayEngine(spreading)) as fleet:
            batches = LocalFleet(fleet).batches()
            for _ in range(10):
                checker.take(next(batches))
            spread, free = places(fleet), ray.available_resources()["CPU"]
        print(json.dumps({"frames": checker.frames, "spread": len(set(spread)), "workers": len(spread), "free": free}))
        cluster.shutdown()
        """,
        str(tmp_path),
    )
    assert told == {"frames": 200, "spread": 2, "workers": 2, "free": 2.0}


def test_a_driver_whose_own_node_is_gone_says_so_and_ends() -> None:
    told = run(
        """
        cluster = make_cluster(resources={"slot:cpu-0": 1})
        job, checker = versioned()
        options = RayOptions(address=cluster.address, slot_resources=True)
        try:
            with WorkerFleet(job, FleetOptions(workers=1), engine=RayEngine(options)) as fleet:
                for batch in LocalFleet(fleet).batches():
                    checker.take(batch)
                    if checker.batches == 5:
                        os.kill(cluster.head_node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
                        killed_at = time.monotonic()
        except CormorantError as error:
            seconds = time.monotonic() - killed_at
            print(json.dumps({"error": str(error), "seconds": seconds, "frames": checker.frames}), flush=True)
        # What is left of the cluster cannot be shut down in an orderly way.
        for processes in cluster.head_node.all_processes.values():
            for info in processes:
                info.process.kill()
        os._exit(0)
        """
    )
    assert "on which this process runs is gone (its raylet has ended)" in told["error"]
    assert told["seconds"] < 60
    assert told["frames"] >= 100


COLLECT = """
job = make_job(num_envs=2, lengths=5, collection={"totalFrames": 400})
checker = make_checker(2, lengths=5, versions=False)
try:
    engine = RayEngine(RayOptions(address=sys.argv[1], num_cpus=0))
    with WorkerFleet(job, FleetOptions(workers=1), engine=engine) as fleet:
        for batch in LocalFleet(fleet).batches():
            checker.take(batch)
        told(fleet, checker)
except CormorantError as error:
    print(json.dumps({"error": str(error)}), flush=True)
"""


@pytest.fixture
def head_with_token() -> Iterator[str]:
    """`ray start --head` as a user types it, with a token; its address."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"),
                *("--num-cpus=0", "--object-store-memory=100000000", "--include-dashboard=false"),
                *("--disable-usage-stats", f"--temp-dir={folder}"),
            ],
            env=environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="right"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            current = Path(folder) / "ray_current_cluster"
            until(lambda: current.exists() and current.read_text().strip())
            yield current.read_text().strip()
        finally:
            for left in of_session(head.pid):
                left.kill()
            head.wait(30)


def test_a_cluster_with_a_token_takes_those_who_have_it(head_with_token: str) -> None:
    right = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "right"}
    exact = {
        "frames": 400, "accepted": 400, "restarts": 0, "dropped": {}, "balance": 0, "attempts": [[0, 0, 0]],
    }  # fmt: skip
    assert run(COLLECT, head_with_token, **right) == exact
    assert run(COLLECT, "auto", RAY_ADDRESS=head_with_token, **right) == exact
    for given in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"}):
        refusal = run(COLLECT, head_with_token, timeout_s=120, **given)["error"]
        assert f'cannot connect to the Ray cluster "{head_with_token}"' in refusal
        assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the one that it was started with" in refusal
