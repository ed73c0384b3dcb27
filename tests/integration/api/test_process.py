"""The head as a process: killed and started again, ended by signals, and what it refuses to start with."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from cormorant_client.delivery import decode
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.heads import HeadProcess
from cormorant_testing.scripts import environment
from cormorant_testing.serving import Reply, weights_file

PATH = "/v1/models/policy/weights"
OPTIONS = {"lengths": (3, 8), "step_s": 0.002}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    job = make_job(
        num_envs=2, policy="versioned", action="box", **OPTIONS,
        collection={"framesPerBatch": 20, "totalFrames": 400},
    )  # fmt: skip
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_document()))
    return path


def check(checker: object, reply: Reply) -> int:
    return int(checker.take(decode(memoryview(reply.body)).tensordict()))  # type: ignore[attr-defined]  # a Checker


@pytest.mark.slow
def test_killed_head_continues_with_weights_and_count(manifest: Path, tmp_path: Path) -> None:
    folder, last_words = tmp_path / "head", tmp_path / "last-words"
    checker = make_checker(2, action="box", acts_by_version=True, lengths=(3, 8))
    with HeadProcess(manifest, folder, "--last-words", str(last_words)) as head:
        api = head.api()
        version = api.put(f"{PATH}?version=7", weights_file(7), Prefer="wait=60").json["version"]
        etag = api.get(PATH).headers["etag"]
        frames = 0
        for _ in range(4):
            reply = api.get("/v1/batches/next?wait=60")
            frames += check(checker, reply)
            assert api.post(f"/v1/batches/{reply.headers['cormorant-batch-id']}/ack").status == 204
        lost = api.get("/v1/batches/next?wait=60")  # taken and not acknowledged: it is collected again
        assert lost.status == 200
        counts = api.get("/v1/status").json["frames"]
        assert counts["collected"] > counts["settled"] == frames
        head.kill()
        assert json.loads(last_words.read_text()) == {"frames": frames}, "a killed head leaves its count"
    with HeadProcess(manifest, folder) as head:
        api = head.api()
        kept = api.get(PATH)
        assert (kept.headers["etag"], kept.body) == (etag, weights_file(7))
        assert api.put(f"{PATH}?version=7", weights_file(7)).status == 200, "a retry over the restart"
        assert api.put(f"{PATH}?version=7", weights_file(8)).kind == "version-conflict"
        assert api.post(f"/v1/batches/{lost.headers['cormorant-batch-id']}/ack").kind == "unknown-batch"
        oldest = []
        while (reply := api.get("/v1/batches/next?wait=60")).status == 200:
            frames += check(checker, reply)
            oldest.append(int(reply.headers["cormorant-min-version"]))
            api.post(f"/v1/batches/{reply.headers['cormorant-batch-id']}/ack")
        assert reply.kind == "stream-ended"
        assert head.process.wait(60) == 0
    assert set(oldest) == {version}, "frames were collected before the weights were there"
    assert frames == 400, "acknowledged frames are counted once, the others collected again"
    assert {epoch for (_, _, _, epoch), _ in checker.streams} == {0, 1}, "no seed comes twice"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_head_in_order_though_requests_wait(
    manifest: Path, tmp_path: Path, number: int, code: int
) -> None:
    with HeadProcess(manifest, tmp_path / "head", "--drain-seconds", "1") as head:
        api = head.api()
        api.post("/v1/pause", {"wait_seconds": 60})
        ends: list[str] = []

        def wait(path: str) -> None:
            try:
                ends.append(str(api.get(path).status))
            except OSError:
                ends.append("cut off")

        paths = ("/v1/events", "/v1/batches/next?wait=300")
        threads = [threading.Thread(target=wait, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert head.end(number) == code
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads), ends
    assert "Traceback" not in head.text, head.text


def test_what_cannot_be_used_is_refused_with_a_sentence(manifest: Path, tmp_path: Path) -> None:
    open_tokens = tmp_path / "tokens.json"
    open_tokens.write_text("{}")
    open_tokens.chmod(0o644)
    for job, options, sentence, code in (
        (manifest, ("--token-file", str(open_tokens)), "other users can read the tokens", 3),
        (manifest, ("--tls-cert", "x"), "--tls-cert and --tls-key must be given together", 2),
        (tmp_path / "nope.yaml", (), "nope.yaml", 2),
    ):
        command = [sys.executable, "-m", "cormorant_api", "--job", str(job), *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
        assert ended.returncode == code, ended
        assert sentence in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stdout + ended.stderr
