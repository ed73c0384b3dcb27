"""`cormorant run` as a user meets it: the real command, real workers, small jobs. And `cormorant dataset export --push`
to a server of this test that keeps what huggingface_hub commits.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from cormorant_cli import __main__ as entry
from cormorant_testing.commands import START_S, Started, Written
from cormorant_testing.datasets import write_dataset
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead
from cormorant_testing.scripts import of_session, until
from cormorant_testing.serving import weights_file

pytestmark = pytest.mark.timeout(3 * START_S)

CLOSE_S = 8.0
"""Five seconds, and what a busy machine takes to end a Python process."""

SLEEPER = """
import time
import gymnasium, numpy
class Sleeper(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return numpy.zeros(1, numpy.float32), {}
    def step(self, action):
        time.sleep(60)
"""


def test_job_fills_its_dataset_and_a_rerun_finds_it_complete(
    start: Started, write: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        collection={"framesPerBatch": 64, "totalFrames": 1003, "seed": 3},
        output={"queue": {}, "dataset": {"uri": f"file://{tmp_path}/my%20data"}},
    )

    code, out, err = start("run", "job.yaml", "--json").end()
    events = [json.loads(line) for line in out.splitlines()]
    finished = events[-1]
    log = [json.loads(line) for line in err.splitlines()]
    monkeypatch.chdir(tmp_path)
    again_code = entry.run(["run", "job.yaml"])
    again = capsys.readouterr().out

    assert code == 0, err
    assert [events[0]["event"], finished["event"]] == ["started", "finished"]
    assert {event["event"] for event in events[1:-1]} <= {"progress"}
    assert (finished["reason"], finished["frames"], finished["new_frames"]) == ("done", 1003, 1003)
    assert finished["episodes"] > 0
    assert finished["mean_return"] == pytest.approx(finished["mean_length"])
    assert "worker_ready" in [event["event"] for event in log]
    assert finished["report"] == f"{tmp_path}/my data-report.html"
    report = Path(finished["report"]).read_text()
    assert '"state": "Completed"' in report
    assert '"collected": 1003' in report
    assert again_code == 0
    assert f"nothing to do: the dataset at file://{tmp_path}/my%20data already has 1,003 frames" in again


def test_run_without_the_extra_api_says_what_writes_reports(
    start: Started, write: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(collection={"framesPerBatch": 64, "totalFrames": 64}, output={"dataset": {"uri": "data/small"}}, replicas=2)
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError(name='fastapi')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "small-report.html").write_text("of an earlier run")

    code, out, err = start("run", "job.yaml").end()

    assert code == 0, err
    said = "warning: no report is written: it needs fastapi, which is not installed: pip install 'cormorant[api]'"
    assert said in err.splitlines()
    assert "report:" not in out
    assert "collected 64 frames" in out, "also where the job ends while workers start"


@pytest.mark.parametrize("where", ["policy", "inline", "subprocess"])
def test_what_raises_is_the_users_traceback(where: str, start: Started, write: Written, tmp_path: Path) -> None:
    place, words = "line 8, in reset", "environment 0 (raising:Sleeper) raised ValueError: oh before its first step"
    code = SLEEPER.replace("return numpy", "raise ValueError('oh')  #")
    spec = {"env": {"gymnasium": {"entrypoint": "raising:Sleeper", "numEnvs": 1, "vectorization": where}}}
    if where == "policy":
        place, words = "line 4, in act", "the policy raised ValueError on observations of shape"
        code = "def make(o, a):\n    return act\ndef act(obs):\n    raise ValueError('oh')\n"
        spec = {"policy": {"entrypoint": "raising:make"}}
    (tmp_path / "raising.py").write_text(code)
    write(**spec)
    exit_code, _, err = start("run", "job.yaml").end()
    first, second, *_, last = err.splitlines()
    assert exit_code == 1
    assert (first, second) == ("Traceback (most recent call last):", f'  File "{tmp_path}/raising.py", {place}')
    assert "cormorant_worker" not in err
    assert last.startswith(f"worker cpu-0: {words}")


def test_a_reader_that_goes_away_is_no_traceback(write: Written, tmp_path: Path) -> None:
    write(collection={"framesPerBatch": 64, "totalFrames": 500})
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m cormorant_cli run job.yaml 2>err | head -1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=START_S,
    )
    assert done.stdout == "small: 500 frames of EnvPool CartPole-v1, 4 per worker; 1 worker\n"
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert "BrokenPipe" not in (tmp_path / "err").read_text()


@pytest.mark.parametrize("fleet", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_ctrl_c_drains_and_leaves_no_process(fleet: str, start: Started, write: Written) -> None:
    write(output={"dataset": {"uri": "data/small"}})
    command = start("run", "job.yaml", "--json", "--fleet", fleet)
    while command.wait_for_event("progress")["frames"] == 0:
        pass

    command.interrupt()
    code, out, err = command.end()

    finished = json.loads(out.splitlines()[-1])
    assert (code, finished["reason"], finished["dropped"]) == (130, "interrupted", {}), err
    assert finished["frames"] > 0
    assert finished["report"] == "data/small-report.html"
    assert json.loads(err.splitlines()[-1]) == {"error": "interrupted", "exit_code": 130}
    assert command.orphans() == []
    until(lambda: not of_session(command.process.pid), seconds=20)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_serving_run_in_any_phase(number: signal.Signals, start: Started, write: Written) -> None:
    write(output={"queue": {"capacityBatches": 2}}, policy={"entrypoint": "cormorant.policies:mlp"}, replicas=2)
    # Python's start, imports, the start of workers, a full queue: whichever it is here.
    for after_s in (0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 3.0, 8.0):
        command = start("run", "job.yaml", "--serve", "--port", "0", "--directory", "head")
        time.sleep(after_s)

        began = time.monotonic()
        command.interrupt(number)
        code, _, err = command.end()

        assert time.monotonic() - began < CLOSE_S
        # Until a line of ours has run, Python ends as it always does: by the signal, or with its own traceback.
        assert "/cormorant_" not in err
        assert code == 130 or (after_s <= 1 and (code == -number or "Traceback" in err)), err
        assert command.orphans() == []


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(start: Started, write: Written, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    write(env={"gymnasium": {"entrypoint": "sleeper:Sleeper", "numEnvs": 2}}, policy={"random": {}})
    command = start("run", "job.yaml", "--json")
    command.wait_for_event("progress")

    command.interrupt()
    time.sleep(0.7)  # into the drain, which waits for a step that never ends
    assert command.process.poll() is None
    began = time.monotonic()
    command.interrupt()
    code, _, _ = command.end()

    assert code == 130
    assert time.monotonic() - began < 2.2, "the drain would have taken 2.3 more"
    assert command.orphans() == []


@pytest.mark.parametrize("before", [0, 1])
def test_a_port_in_use_is_found_before_workers_start(
    write: Written, capsys: pytest.CaptureFixture[str], before: int
) -> None:
    # Below the ports that the system gives to other tests, one of which might have the port before this one.
    port = 20_001 + 2 * (os.getpid() % 5_000)
    with socket.create_server(("127.0.0.1", port)):
        assert entry.run(["run", str(write()), "--serve", "--port", str(port - before)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"cannot listen on 127.0.0.1 port {port}: Address already in use")
    assert "(batches and weights use the one after it)" in said.err
    assert said.out == ""


EPISODES = {"collection": {"framesPerBatch": 64, "episodes": {"count": 2}}, "output": {"dataset": {"uri": "results"}}}
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.mark.parametrize(
    ("spec", "options", "sentence"),
    [
        ({"policy": {"entrypoint": "nets:make_net", "kwargs": {"widht": 4}}}, [], "did you mean width?"),
        (EPISODES, [], "small is an evaluation; run it with: cormorant evaluate job.yaml"),
        pytest.param({"workerGroups": [{"name": "gpu", "device": "gpu"}]}, [], "with --device cpu", marks=without_cuda),
        pytest.param({}, ["--device", "cuda"], "with --device cpu", marks=without_cuda),
    ],
)
def test_what_cannot_run_is_refused(
    spec: dict[str, Any],
    options: list[str],
    sentence: str,
    write: Written,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(write(**spec).parent)
    Path("nets.py").write_text("def make_net(observation_space, action_space, width=8): ...\n")
    assert entry.run(["run", "job.yaml", *options]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == "" or "--device" in sentence, "before workers start, which look for their device themselves"


def test_bad_input_of_an_evaluation_gets_a_sentence(
    write: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write(policy={"entrypoint": "cormorant.policies:mlp"}))
    for arguments, sentence in (
        ([], "small has no collection.episodes; say how many to play"),
        (["--episodes", "2", "--video", "1"], "--video needs a folder for its files; give --output"),
        (["--video", "1", "--output", "s3://b/x"], "needs a folder of this machine for its files, and --output s3://"),
        (["--episodes", "2", "--seed", str(2**31 - 1)], "leaves no room for the episodes' own seeds"),
    ):
        assert entry.run(["evaluate", job, *arguments]) == 2
        assert sentence in capsys.readouterr().err
    none, misfit, other = (str(tmp_path / name) for name in ("none.safetensors", "misfit.safetensors", "other.st"))
    for file in (misfit, other):
        Path(file).write_bytes(weights_file(1.0))
    for files, sentence in (
        ((none,), f"cannot read weights from {none}: there is no such file; correct its path"),
        ((job,), f"worker cpu-0: the weights in {job} are not safetensors"),
        ((misfit, other), f"tensors in {misfit} do not fit the policy"),
    ):
        words = [word for file in files for word in ("--weights", file)]
        assert entry.run(["evaluate", job, "--json", "--episodes", "2", "--workers", "1", *words]) == 2
        said = json.loads(capsys.readouterr().err)  # one object: the worker's traceback tells a user nothing
        assert sentence in said["error"]


# -- what is pushed --------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ScriptedHead]:
    """Answers the requests of a commit of small files: https://huggingface.co/docs/hub/api. Keeps them in `hub`."""

    def answer(heard: Heard) -> Say:
        status, found = 200, dict[str, Any]()
        if heard.headers["authorization"] != "Bearer hf_mine":
            status, found = 401, {"error": "Invalid credentials"}
        elif heard.path == "/api/repos/create":
            asked = json.loads(heard.body)
            found = {"url": f"{server.url}/{asked['type']}s/{asked['organization']}/{asked['name']}"}
        elif heard.path == "/api/validate-yaml":
            found = {"errors": [], "warnings": []}
        elif heard.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(heard.body)["files"]]
            found = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        else:
            assert heard.path == "/api/datasets/me/pole/commit/main"
            for line in map(json.loads, heard.body.splitlines()):
                if line["key"] == "file":
                    path = tmp_path / "hub" / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(line["value"]["content"]))
            found = {"commitOid": "1", "commitUrl": f"{server.url}/datasets/me/pole/commit/1"}
        return Say(status, json.dumps(found).encode(), {"Content-Type": "application/json"})

    with ScriptedHead(answer) as server:
        yield server


def test_what_was_pushed_is_the_dataset_and_a_refusal_is_a_sentence(hub: ScriptedHead, tmp_path: Path) -> None:
    uri = write_dataset(str(tmp_path / "data"))
    command = [Path(sys.executable).with_name("cormorant"), "dataset", "export", uri, "--to", "huggingface"]
    command += ["--push", "me/pole", "--out"]

    def push(token: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "NO_PROXY": "127.0.0.1"}
        return subprocess.run(
            [*command, tmp_path / token], env=environment, capture_output=True, text=True, check=False
        )

    refused = push("hf_other")
    assert refused.returncode == 1
    assert f"cannot push to me/pole at {hub.url}: " in refused.stderr
    assert "the folder is complete" in " ".join(refused.stderr.split())
    assert (tmp_path / "hf_other" / "data" / "cpu-0-0.parquet").exists()
    done = push("hf_mine")
    assert done.returncode == 0, done.stderr
    assert f"pushed: {hub.url}/datasets/me/pole/commit/1" in done.stdout
    read = datasets.load_dataset(str(tmp_path / "hub"), split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(read["reward"]) == list(range(8))
