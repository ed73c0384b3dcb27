"""`cormorant run --fleet ray` as a user meets it: a Ray cluster of its own, or one that is not there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cormorant_cli import __main__ as entry
from cormorant_testing.commands import START_S, Started, Written
from cormorant_testing.scripts import of_session, until, unused_port

pytestmark = pytest.mark.timeout(3 * START_S)


@pytest.mark.slow
def test_dataset_is_identical_on_both_engines(start: Started, write: Written, tmp_path: Path) -> None:
    files = []
    for fleet in ("local", "ray"):
        write(
            env={"envpool": {"taskId": "CartPole-v1", "numEnvs": 8, "numThreads": 1}},
            policy={"entrypoint": "cormorant.policies:mlp"},
            collection={"mode": "sync", "framesPerBatch": 256, "totalFrames": 3001, "seed": 5},
            output={"queue": {}, "dataset": {"uri": f"data/{fleet}"}},
            replicas=2,
        )
        code, out, err = start("run", "job.yaml", "--json", "--fleet", fleet, "--workers", "2").end()
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["new_frames"] == 3001
        folder = tmp_path / "data" / fleet
        files.append({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.arrow")})
    local, ray = files
    assert sorted(local) == sorted(ray) == ["cpu-0-0/frames-000000.arrow", "cpu-1-0/frames-000000.arrow"]
    for name, content in local.items():
        assert ray[name] == content, name


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_drains_and_leaves_no_process(write: Written, tmp_path: Path) -> None:
    write()
    command = subprocess.Popen(
        [sys.executable, "-m", "cormorant_cli", "run", "job.yaml", "--json", "--fleet", "ray"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        assert command.stdout is not None
        while (event := json.loads(command.stdout.readline()))["event"] != "progress" or not event["frames"]:
            pass
        # A terminal sends it to every process of the group, Ray's among them.
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=60)
        finished = json.loads(out.splitlines()[-1])
        assert (command.returncode, finished["reason"], finished["dropped"]) == (130, "interrupted", {}), err
        until(lambda: not of_session(command.pid), seconds=20)
    finally:
        command.kill()


def test_a_cluster_that_is_not_there_is_named(write: Written, capsys: pytest.CaptureFixture[str]) -> None:
    path = write()
    address = f"127.0.0.1:{unused_port()}"
    assert entry.run(["run", str(path), "--fleet", "ray", "--ray-address", address]) == 1
    said = capsys.readouterr().err
    assert f'nothing answers at the Ray address "{address}"' in said
    assert "`ray start --head`" in said
    assert "Traceback" not in said
