"""Every example runs as its first line says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

from cormorant import load_job, make_collector, open_fleet
from cormorant_cli import __main__ as entry
from cormorant_testing.commands import START_S, Started, Written
from cormorant_testing.scripts import until, unused_port
from cormorant_worker.errors import ManifestError

EXAMPLES = Path(__file__).parents[3] / "examples"
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))
ON_THIS_MACHINE = [path for path in MANIFESTS if path.stem not in ("pong-volume", "cartpole-evaluation")]
"""Without those that write to a volume of their pods."""

pytestmark = pytest.mark.timeout(3 * START_S)


def test_examples_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["validate", *map(str, MANIFESTS)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("manifest", ON_THIS_MACHINE, ids=lambda path: path.stem)
def test_examples_collect(manifest: Path, start: Started) -> None:
    frames = 2 * load_job(manifest).spec.collection.frames_per_batch + 1
    options = ["--frames", str(frames), "--workers", "1", "--device", "cpu"]
    code, out, err = start("run", str(manifest), "--json", *options).end()
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["new_frames"] == frames


def test_initial_weights_are_those_of_the_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, job = tmp_path / "policy.safetensors", tmp_path / "job.yaml"
    job.write_text((EXAMPLES / "cartpole-ppo.yaml").read_text().replace(", numThreads: 1", ""))  # to be calibrated
    assert entry.run(["weights", "init", str(job), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 6 tensors of policy, 18.6 KiB\n"
    with make_collector(job) as collector:
        expected = collector.weights.current()["policy"]
    found = safetensors.torch.load_file(out)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        f"policy/{name}": tensor.tolist() for name, tensor in expected.items()
    }
    job.write_text(job.read_text().replace("entrypoint: cormorant.policies:mlp", "random: {}"))
    assert entry.run(["weights", "init", str(job), str(out)]) == 2
    assert "has no weights: it is random or not a torch module" in capsys.readouterr().err


def test_torch_cartpole_collects() -> None:
    script = [sys.executable, EXAMPLES / "torch_cartpole.py", "--num-envs", "64", "--batches", "2"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^2,048 frames, (\d+) episodes ended \(64, 32\)$", done.stdout, re.MULTILINE)[1] > "0"


LEARNERS = {
    "learner_cartpole.py": r"return of the last episodes: ([\d.]+)",
    "self_play.py": r"over random moves ([\d.]+)",
    "rest_ppo_cartpole.py": r"mean return of the last episodes: ([\d.]+)$",
    "rest_ppo_pong.py": r"6 updates, loss (-?[\d.]+) -> (-?[\d.]+)$",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("option", [["--quick"], ["--seed", "2"]], ids="".join)
@pytest.mark.parametrize(("script", "goal"), [("learner_cartpole.py", 450), ("self_play.py", 0.8)])
def test_learners_run_and_reach_their_goal(script: str, goal: float, option: list[str]) -> None:
    is_quick = option == ["--quick"]
    found = numbers_of(script, *option, timeout_s=2 * START_S if is_quick else 1800)
    assert found[-1] >= (0.01 if is_quick else goal)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("task", "option"), [("cartpole", "--seed=2"), ("pong", "--updates=6")])
def test_learners_over_rest_learn(task: str, option: str, start: Started, tmp_path: Path) -> None:
    """CartPole is learned; the loss of Pong falls."""
    port, tokens = str(unused_port()), tmp_path / "head/tokens.json"
    start("run", str(EXAMPLES / f"{task}-ppo.yaml"), "--serve", "--port", port, "--directory", "head")
    until(tokens.exists, seconds=START_S, what="the head makes a token file")
    head = ["--url", f"http://127.0.0.1:{port}", "--token-file", str(tokens)]
    *before, after = numbers_of(f"rest_ppo_{task}.py", *head, option, timeout_s=1500)
    assert after < before[0] if before else after >= 450


def numbers_of(script: str, *arguments: str, timeout_s: float) -> list[float]:
    """The numbers in the last line of a learner that says how it went."""
    command = [sys.executable, EXAMPLES / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(number) for number in list(re.finditer(LEARNERS[script], done.stdout, re.MULTILINE))[-1].groups()]


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.timeout(3 * START_S)
def test_a_fleet_from_a_path_finds_its_policy_beside_it(write: Written, tmp_path: Path) -> None:
    (tmp_path / "beside_policies.py").write_text(
        "from cormorant.policies import mlp\ndef make(o, a):\n    return mlp(o, a, hidden=[8])\n"
    )
    collection = {"framesPerBatch": 64, "totalFrames": 300}
    with open_fleet(write(collection=collection, policy={"entrypoint": "beside_policies:make"}), workers=1) as fleet:
        frames = [batch.numel() for batch in fleet.batches()]
    assert frames == [64, 64, 64, 64, 44]


def test_one_of_several_jobs_is_chosen_by_name(write: Written) -> None:
    path = write()
    path.write_text(path.read_text() + "---\n" + path.read_text().replace("name: small", "name: other"))
    with pytest.raises(ManifestError, match="holds the CollectorJobs small, other; choose one of them by its name"):
        load_job(path)
    assert load_job(path, name="other").metadata.name == "other"
