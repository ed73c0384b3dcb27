"""The process that forks workers: what they inherit, what happens when it dies."""

import io
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.fleets import balance, make_fleet, reading
from cormorant_testing.scripts import until
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.fleet.local.engine import WorkerProcess
from cormorant_worker.fork_server import ENVIRONMENTS, WORKERS, ForkServer, Imports, fork_server
from cormorant_worker.launch import make_collector
from cormorant_worker.local_fleet import LocalFleet


def test_workers_find_the_folder_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with make_fleet(make_job(num_envs=2, lengths=5), workers=2) as fleet:
        for worker in fleet.stats().workers:
            process = psutil.Process(worker.pid)
            assert Path(f"/proc/{worker.pid}/cwd").readlink() == tmp_path
            assert Path(f"/proc/{worker.pid}/comm").read_text().strip() == f"{worker.name}-0"
            assert os.getsid(worker.pid) == worker.pid
            # It keeps nothing of its siblings' and the fork server's: only the end of its own sockets ends it.
            assert sum(connection.raddr == "" for connection in process.net_connections("unix")) == 2


def test_workers_end_with_their_fork_server_and_are_replaced() -> None:
    job = make_job(num_envs=2, lengths=5, collection={"totalFrames": 4000}, step_s=0.001)
    checker = make_checker(2, lengths=5)
    forks_them = fork_server(WORKERS)
    with make_fleet(job, workers=2) as fleet:
        for batch in LocalFleet(fleet).batches():
            checker.take(batch)
            if forks_them.is_alive and checker.frames > 500:
                os.kill(forks_them.pid, signal.SIGKILL)
                until(lambda: not forks_them.is_alive)
        stats = fleet.stats()
        assert stats.frames == checker.frames == 4000
        assert stats.restarts == 2
        assert balance(fleet) == 0
    assert fork_server(WORKERS).pid != forks_them.pid


def test_fleets_of_a_process_leave_one_idle_fork_server() -> None:
    pids = set()
    for _ in range(2):
        with reading(make_job(num_envs=2, lengths=5), workers=2) as (_, reader):
            reader.next_batch()
        server = psutil.Process(fork_server(WORKERS).pid)
        until(lambda server=server: server.children(recursive=True) == [])  # it reaps the killed when it is idle
        pids.add(server.pid)
    assert len(pids) == 1


@pytest.mark.slow
def test_workers_are_killed_unborn_or_stopped() -> None:
    fresh = ForkServer(WORKERS)
    unborn = WorkerProcess(WorkerPlace(), fresh, Imports())
    unborn.kill()
    stopped = WorkerProcess(WorkerPlace(index=1), fresh, Imports())
    try:
        until(lambda: stopped.pid)
        os.kill(stopped.pid, signal.SIGSTOP)
        assert fresh.status(1).code == -signal.SIGKILL
        stopped.kill()
        assert not psutil.pid_exists(stopped.pid)
        assert stopped.describe_end().startswith("was killed by SIGKILL")
        stopped.kill()  # it is known to have ended: nothing is killed
    finally:
        for worker in (unborn, stopped):
            worker.close()
        fresh.close()


def test_closing_a_starting_fleet_leaves_no_process() -> None:
    before = threading.active_count()
    fresh = ForkServer(WORKERS)
    ours, theirs = socket.socketpair()
    number = fresh.fork("cpu-0-0", (theirs.fileno(),) * 3)
    theirs.close()
    assert fresh.status(number).code is None
    ours.close()
    fresh.close()
    assert not psutil.pid_exists(fresh.pid)
    assert threading.active_count() == before


_BESIDE = """
from gymnasium.envs.classic_control import CartPoleEnv

class Env(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        print("an environment began")
        return super().reset(seed=seed, options=options)
"""


def test_environments_import_from_the_folder_and_print_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "env_beside_a_notebook.py").write_text(_BESIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in notebooks
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # it has no descriptor
    env = {"gymnasium": {"entrypoint": "env_beside_a_notebook:Env", "vectorization": "subprocess", "numEnvs": 1}}
    collector = make_collector(env=env)
    collector.collect(num_steps=2)
    collector.close()
    assert capfd.readouterr().err == "an environment began\n"


def test_fork_server_of_a_parent_that_ignores_children_knows_ends() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        server = ForkServer(ENVIRONMENTS)
    finally:
        signal.signal(signal.SIGCHLD, before)
    ours, theirs = socket.socketpair()
    ours.close()  # a parent that is gone: it ends at once
    with theirs:
        number = server.fork("env-0", [theirs.fileno()] * 4)
    assert server.wait(number, 60) == 0
    assert server.is_alive
    server.close()
