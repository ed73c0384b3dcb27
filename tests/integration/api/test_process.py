"""The head as a process: killed and started again at any moment, ended by signals, and what it refuses to start with.
The next head is exact: frames, trajectories, statistics of acknowledged batches, and results of an evaluation.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cormorant import evaluate
from cormorant_api.control.journal import Journal
from cormorant_cli import __main__ as entry
from cormorant_client.delivery import Delivery, decode
from cormorant_contract.job import CollectorJob
from cormorant_testing.collecting import ExpectedMoments, make_checker, make_job, seen_of
from cormorant_testing.heads import START_S, HeadProcess
from cormorant_testing.pods import tokens_file
from cormorant_testing.scripts import environment, until, unused_port
from cormorant_testing.serving import Api, serve, weights_file
from cormorant_worker.fleet.fleet_state import FleetState

PATH = "/v1/models/policy/weights"
JOB = make_job(
    num_envs=2, policy="versioned", action="box", lengths=(3, 8), step_s=0.002,
    collection={"framesPerBatch": 20, "totalFrames": 400},
)  # fmt: skip


def take(api: Api) -> Delivery | None:
    """The next batch, which is not acknowledged; None at the end."""
    reply = api.get("/v1/batches/next?wait=60")
    assert reply.status == 200 or reply.kind == "stream-ended"
    return decode(memoryview(reply.body)) if reply.status == 200 else None


@pytest.mark.slow
def test_killed_head_continues_with_weights_and_count(tmp_path: Path) -> None:
    folder, last_words = tmp_path / "head", tmp_path / "last-words"
    checker = make_checker(2, action="box", acts_by_version=True, lengths=(3, 8))
    frames = 0
    with HeadProcess(JOB, folder, "--last-words", str(last_words)) as head:
        api = head.api()
        version = api.put(f"{PATH}?version=7", weights_file(7), Prefer="wait=60").json["version"]
        etag = api.get(PATH).headers["etag"]
        for _ in range(4):
            batch = take(api)
            assert batch is not None
            frames += checker.take(batch.tensordict())
            assert api.post(f"/v1/batches/{batch.id}/ack").status == 204
        lost = take(api)  # taken and not acknowledged: it is collected again
        assert lost is not None
        counts = api.get("/v1/status").json["frames"]
        assert counts["collected"] > counts["settled"] == frames
        head.kill()
        assert json.loads(last_words.read_text()) == {"frames": frames}, "a killed head leaves its count"
    with HeadProcess(JOB, folder) as head:
        api = head.api()
        kept = api.get(PATH)
        assert (kept.headers["etag"], kept.body) == (etag, weights_file(7))
        assert api.put(f"{PATH}?version=7", weights_file(7)).status == 200, "a retry over the restart"
        assert api.put(f"{PATH}?version=7", weights_file(8)).kind == "version-conflict"
        assert api.post(f"/v1/batches/{lost.id}/ack").kind == "unknown-batch"
        while (batch := take(api)) is not None:
            frames += checker.take(batch.tensordict())
            assert batch.min_version == version, "frames were collected before the weights were there"
            api.post(f"/v1/batches/{batch.id}/ack")
        assert head.process.wait(60) == 0
    assert frames == 400, "acknowledged frames are counted once, the others collected again"
    assert {epoch for (_, _, _, epoch), _ in checker.streams} == {0, 1}, "no seed comes twice"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_head_in_order_though_requests_wait(tmp_path: Path, number: int, code: int) -> None:
    with HeadProcess(JOB, tmp_path / "head", "--drain-seconds", "1") as head:
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


def test_what_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path) -> None:
    manifest, open_tokens = tmp_path / "job.yaml", tmp_path / "tokens.json"
    manifest.write_text(yaml.safe_dump(JOB.to_document()))
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


@pytest.mark.slow
def test_killed_head_neither_loses_nor_doubles_statistics(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    collection = {"totalFrames": 400, "normalize": {"observation": {"clip": 3}, "reward": {"gamma": 0.9}}}
    job = make_job(policy="seer", action="box", lengths=(3, 7), step_s=0.001, collection=collection)
    expected = ExpectedMoments()
    with HeadProcess(job, folder) as head:
        api = head.api()
        for number in range(4):
            batch = take(api)
            assert batch is not None
            seen_of(taken := batch.tensordict(), batch.statistics)
            expected.take(taken)
            api.post(f"/v1/batches/{batch.id}/ack")
            if number == 2:
                assert api.put(f"{PATH}?version=7", weights_file(7), Prefer="wait=60").status == 200
        published = {number: found for number, found in batch.statistics.items() if number == 7}
        assert take(api) is not None, "it is lost"
        head.kill()
    with HeadProcess(job, folder) as head:
        api = head.api()
        while (batch := take(api)) is not None:
            assert batch.min_version == 7
            assert batch.statistics[7]["observation"]["count"] == 60, "a version keeps what it was published with"
            assert not published or batch.statistics == published
            seen_of(taken := batch.tensordict(), batch.statistics)
            expected.take(taken)
            api.post(f"/v1/batches/{batch.id}/ack")
        assert head.process.wait(60) == 0
    assert len(expected.seen) == 400
    expected.check(Journal(folder).statistics)


def evaluation(results: Path, *, episodes: int = 30, step_s: float = 0.005) -> CollectorJob:
    return make_job(
        policy="cormorant.policies:mlp", dataset=str(results), longest=60, step_s=step_s,
        collection={"framesPerBatch": 2, "episodes": {"count": episodes, "deterministic": False}},
    )  # fmt: skip


def table_of(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in ("planned", "episodes", "summary", "tasks")}


def test_command_waits_for_a_head_that_has_yet_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = evaluation(tmp_path / "results", episodes=5, step_s=0)
    tokens, port = tokens_file(tmp_path), unused_port()
    arguments = ["evaluate", "--url", f"http://127.0.0.1:{port}", "--token-file", str(tokens), "--wait"]
    assert entry.run([*arguments, "0.5"]) == 1
    said = capsys.readouterr().err
    assert "no table after 0.5 s: " in said
    assert "for 3 s" not in said, "the client's own patience"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(entry.run, [*arguments, "120", "--json"])
        until(lambda: str(port) in capsys.readouterr().err or waiting.done())
        with serve(job, directory=tmp_path / "head", port=port, token_file=tokens):
            assert waiting.result(120) == 0
    said = capsys.readouterr().out  # after what the head in this process logs
    assert len(json.loads(said[said.index("{") :])["episodes"]) == 5


@pytest.mark.slow
def test_heads_and_workers_that_are_killed_change_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    job = evaluation(results)
    with HeadProcess(job, tmp_path / "head", "--workers", "2") as head:
        reader = head.api("read")
        until(lambda: len(reader.get("/v1/evaluation").json["episodes"]) >= 4)
        os.kill(reader.get("/v1/workers").json["workers"][0]["pid"], signal.SIGKILL)
        until(lambda: len(reader.get("/v1/evaluation").json["episodes"]) >= 8)
        head.kill()
    before = len(list((results / "played").iterdir()))
    with HeadProcess(job, tmp_path / "head", "--workers", "1", "--linger-seconds", "5") as head:
        reader = head.api("read")
        until(lambda: reader.get("/v1/status").json["phase"] == "Completed")
        served = reader.get("/v1/evaluation").json
        url = f"http://127.0.0.1:{reader.port}"
        arguments = ["evaluate", "--url", url, "--token-file", str(tmp_path / "head/tokens.json")]
        assert entry.run(arguments) == 0
        assert head.process.wait(60) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [url, "30"]
    assert len(list((results / "played").iterdir())) > before
    alone = json.loads(evaluate(tmp_path / "head.yaml", workers=1).to_json())
    assert alone["planned"] == len(alone["episodes"]) == 30
    assert table_of(json.loads((results / "evaluation.json").read_text())) == alone
    assert table_of(served) == alone


QUIESCE = "cormorant_worker.fleet.turn.quiesce.Quiesce"
STEPS = (
    # When, the function, a word among its arguments; whether the count of the state is kept from there on, and its
    # weights.
    ("before", "cormorant_api.routes.control.parse_body", "", False, False),
    ("before", f"{QUIESCE}.restore", "", False, False),
    ("before", f"{QUIESCE}.replies", "restore its state", False, False),
    ("after", "cormorant_worker.fleet.fleet.WorkerFleet.restore", "", False, False),
    ("before", "cormorant_api.weights.publisher.WeightPublisher.adopt", "", True, False),
    ("after", "cormorant_api.weights.publisher.WeightPublisher.adopt", "", True, True),
)


class Deliveries:
    """Everything that learners got, over all heads."""

    def __init__(self) -> None:
        self.settled = 0
        """Frames that the next head must not collect again."""
        self.ids: set[int] = set()

    def take(self, api: Api, batches: int) -> int:
        """Take and acknowledge batches (fewer where the job ends), whose trajectories came in none before these.
        Returns their frames.
        """
        frames, ids = 0, set()
        for _ in range(batches):
            batch = take(api)
            if batch is None:
                break
            assert api.post(f"/v1/batches/{batch.id}/ack").status == 204
            frames += batch.num_frames
            ids |= {number for part in batch.parts for number in part.arrays["collector/traj_ids"].flatten().tolist()}
        assert ids
        assert not ids & self.ids, "a trajectory id names one episode"
        self.ids |= ids
        return frames


def pause(api: Api) -> None:
    assert api.post("/v1/pauses", {"owner": "test", "ttl_seconds": 600, "wait_seconds": 60}).status == 201


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_head_killed_at_any_step_of_a_restore_leaves_the_next_one_exact(tmp_path: Path) -> None:
    total = 2000
    job = make_job(
        num_envs=2, policy="versioned", action="box", lengths=(3, 8), workers=2, collection={"totalFrames": total}
    )
    saved, taken = Deliveries(), Deliveries()
    with HeadProcess(job, tmp_path / "first", "--workers", "2") as head:
        api = head.api()
        assert api.put(f"{PATH}?version=4", weights_file(4), Prefer="wait=60").status == 200
        saved.take(api, 40)
        pause(api)
        state = api.get("/v1/state").body
        head.kill()
    count = FleetState.from_bytes(state).frames
    assert count >= 800
    version = 0
    for when, function, word, keeps_count, keeps_weights in STEPS:
        how = ("cormorant_testing.killed_head", when, function, word)
        with HeadProcess(job, tmp_path / "second", "--workers", "2", module=how) as head:
            api = head.api()
            status = api.get("/v1/status").json
            assert (status["frames"]["settled"], status["weights"]["version"]) == (taken.settled, version), function
            taken.settled += taken.take(api, 1)
            pause(api)
            below = psutil.Process(head.process.pid).children(recursive=True)
            with suppress(OSError, http.client.HTTPException):
                pytest.fail(f"the head was not killed: {api.put('/v1/state', state)}")
            assert head.process.wait(60) == -9
            assert psutil.wait_procs(below, timeout=START_S)[1] == [], "workers outlive their head"
            taken.settled = max(taken.settled, count) if keeps_count else taken.settled
            version = 4 if keeps_weights else version
    taken.ids |= saved.ids  # restoring a state brings its ids back
    for is_last in (False, True):
        with HeadProcess(job, tmp_path / "second", "--workers", "2") as head:
            api = head.api()
            assert api.get("/v1/status").json["frames"]["settled"] == taken.settled
            pause(api)
            reply = api.put("/v1/state", state)
            assert reply.status == 200, reply
            assert (reply.json["frames"]["collected"], reply.json["weights"]["version"]) == (count, 4)
            api.post("/v1/resume", {"owner": "test"})
            if not is_last:
                taken.settled = max(taken.settled, count + taken.take(api, 10))
                head.kill()
            else:
                assert count + taken.take(api, total) == total
                until(lambda: head.process.poll() is not None)
                assert head.process.returncode == 0, head.text
