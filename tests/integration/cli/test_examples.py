"""Every example runs as its first line says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cormorant_cli import __main__ as entry
from cormorant_testing.commands import START_S, Started
from cormorant_worker import load_job, make_collector

EXAMPLES = Path(__file__).parents[3] / "examples"
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))

pytestmark = pytest.mark.timeout(3 * START_S)


def test_examples_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["validate", *map(str, MANIFESTS)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_examples_collect(manifest: Path, start: Started) -> None:
    frames = 2 * load_job(manifest).spec.collection.frames_per_batch + 1
    code, out, err = start("run", str(manifest), "--json", "--frames", str(frames), "--workers", "1").end()
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["new_frames"] == frames


def test_recurrent_example_hands_its_state_on() -> None:
    with make_collector(EXAMPLES / "recurrent.yaml") as collector:
        batch = collector.collect(num_steps=64)
    extra = set(batch.keys()) - {"observation", "action", "next", "collector"}
    assert batch.shape == (16, 4)
    assert {"is_init", "action_log_prob"} < extra  # and the states
    assert batch["is_init"][:, 0].all()


@pytest.mark.slow
def test_learner_runs() -> None:
    done = learner("--quick")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("mean return of the last episodes: ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_learner_reaches_450() -> None:
    done = learner("--seed", "2", timeout_s=1800)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 450


def learner(*arguments: str, timeout_s: float = 2 * START_S) -> "subprocess.CompletedProcess[str]":
    script = EXAMPLES / "learner_cartpole.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=timeout_s)
