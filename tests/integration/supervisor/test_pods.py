"""Supervisors with real Ray nodes on this machine: joining, a head that dies, SIGTERM, tokens."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from cormorant_client.delivery import decode
from cormorant_client.publishing import make_body
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.pods import TOKEN, Pod, head_pod, tokens_file, worker_pod
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import answers, until, unused_port
from cormorant_testing.serving import Api, weights_file
from cormorant_worker.pod_files import ACTOR_TITLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WEIGHTS = "/v1/models/policy/weights"
OPTIONS = {"lengths": (3, 8), "step_s": 0.002}
TOTAL = 6000


def test_worker_waits_for_its_head_and_joins_the_next() -> None:
    port = unused_port()
    with worker_pod(port) as worker:
        assert worker.get("/livez") == (200, "ok\n")
        assert worker.get("/readyz") == (503, "Ray has not joined the head\n")
        with head_pod(port) as head:
            worker.wait_for("joined")
            assert worker.get("/readyz") == (200, "ok\n")
            assert 'cormorant_worker_joined{collectorjob="",group="cpu"} 1.0' in worker.get("/metrics")[1]
            head.kill()
            worker.wait_for("ray_ended", seconds=10)  # Ray itself would wait for 30
            assert worker.get("/readyz")[0] == 503
            assert worker.get("/livez")[0] == 200
        with head_pod(port) as head:
            worker.wait_for("joined", times=2, seconds=30)
            assert 'cormorant_worker_joins_total{collectorjob="",group="cpu"} 2.0' in worker.get("/metrics")[1]
            assert worker.end() == 0
            assert worker.left() == []
            assert head.end() == 128 + signal.SIGTERM
            assert head.left() == []


def test_worker_with_another_token_is_given_up_with_a_sentence() -> None:
    port = unused_port()
    with head_pod(port) as head, worker_pod(port, RAY_AUTH_TOKEN="f" * 32) as worker:
        head.wait_for("ray_ready")
        refusal = worker.wait_for("join_refused")
        assert refusal["reason"] == (
            f"the head at 127.0.0.1:{port} refuses this pod's token; RAY_AUTH_TOKEN must be the one in the job's "
            "Secret, and RAY_AUTH_MODE must be token in all pods; if that Secret is newer than the head, "
            "delete the head's pod"
        )
        assert worker.get("/readyz")[0] == 503
        assert worker.wait(120) == 3, "not counted: the slot did nothing wrong"
        assert worker.said("pod_blocked")[0]["reason"].endswith("(3 attempts)")
        assert worker.left() == []


def test_head_ends_with_its_command_and_fails_with_ray(tmp_path: Path) -> None:
    last_words = tmp_path / "last-words"
    last_words.write_text('{"frames": 7}')
    sleep = "import os, time; assert os.environ['RAY_ADDRESS']; time.sleep({}); raise SystemExit(7)"
    with head_pod(unused_port(), sys.executable, "-c", sleep.format(0)) as head:
        assert head.wait() == 7
        assert head.left() == []
    command = (sys.executable, "-c", sleep.format(600))
    with head_pod(unused_port(), *command, CORMORANT_LAST_WORDS=str(last_words)) as head:
        head.wait_for("ray_ready")
        until(lambda: head.below("gcs_server"))
        head.below("gcs_server")[0].kill()
        assert head.wait() == 1
        assert "and with it every worker" in head.said("ray_ended")[0]["reason"]
        assert json.loads(last_words.read_text()) == {"frames": 7, "reason": head.said("ray_ended")[0]["reason"]}
        assert head.left() == []
    with head_pod(unused_port(), "no-such-command") as head:
        assert head.wait() == 1
        assert "'no-such-command' cannot be run" in head.said("command_failed")[0]["reason"]


def test_head_whose_ray_got_no_cpu_time_says_so_and_is_not_counted(tmp_path: Path) -> None:
    last_words = tmp_path / "last-words"
    last_words.write_text('{"frames": 7}')
    with head_pod(unused_port(), CORMORANT_LAST_WORDS=str(last_words), RAY_health_check_timeout_ms="1000") as head:
        head.wait_for("ray_ready")
        (raylet,) = head.below("/raylet")
        raylet.suspend()
        time.sleep(12)
        raylet.resume()
        assert head.wait(30) == 4, head.text
        assert "get no CPU time" in json.loads(last_words.read_text())["reason"]
        assert head.left() == []


class Job:
    """One job whose pods are processes: heads by epoch, on one address."""

    def __init__(self, folder: Path, **spec: object) -> None:
        self.folder, self.gcs_port, self.port = folder, unused_port(), unused_port()
        document = make_job(
            num_envs=2, policy="versioned", action="box", **OPTIONS,
            collection={"mode": "async", "framesPerBatch": 20, "totalFrames": TOTAL},
        ).to_document()  # fmt: skip
        document["spec"] |= {"workerGroups": [{"name": "cpu"}], "replicas": 2} | spec
        self.manifest = folder / "job.yaml"
        self.manifest.write_text(yaml.safe_dump(document))
        self.tokens = tokens_file(folder)
        self.checker = make_checker(2, action="box", acts_by_version=True, **OPTIONS)

    def head(self, *, epoch: int = 1, floor_frames: int = 0, published_version: int = 0) -> Pod:
        return head_pod(
            self.gcs_port,
            *(sys.executable, "-m", "cormorant_api", "--job", str(self.manifest)),
            *("--fleet", "ray", "--ray-address", "auto", "--ray-slot-resources"),
            *("--port", str(self.port), "--data-port", str(unused_port())),
            *("--directory", str(self.folder / f"epoch-{epoch}"), "--token-file", str(self.tokens)),
            *("--epoch", str(epoch), "--floor-frames", str(floor_frames), "--linger-seconds", "0.5"),
            *("--last-words", str(self.folder / "last-words"), "--published-version", str(published_version)),
        )

    def worker(self, index: int, *, group: str = "cpu", **more: str) -> Pod:
        return worker_pod(self.gcs_port, f"{group}-{index}", **more)

    def api(self, head: Pod) -> Api:
        """Waits until the head is ready."""
        head.wait_for("head_ready", seconds=120)
        return Api(self.port, f"operator-{TOKEN}")

    def take(self, api: Api) -> bool:
        """Take and acknowledge one batch. False: there are no more."""
        reply = api.get("/v1/batches/next?wait=60")
        if reply.status != 200:
            assert reply.kind in ("stream-ended", "draining"), reply
            return False
        self.checker.take(decode(memoryview(reply.body)).tensordict())
        assert api.post(f"/v1/batches/{reply.headers['cormorant-batch-id']}/ack").status == 204
        return True

    def take_all(self, api: Api, *, until: int = TOTAL) -> None:
        while self.checker.frames < until and self.take(api):
            pass
        assert self.checker.frames >= until or until == TOTAL


def publish(api: Api, version: int, body: bytes = b"") -> None:
    reply = api.put(f"{WEIGHTS}?version={version}", body or weights_file(version), Prefer="wait=60")
    assert reply.json["state"] == "applied"


def until_all_ready(api: Api) -> None:
    until(lambda: all(worker["ready"] for worker in api.get("/v1/workers").json["workers"]), seconds=120)


def attempts(api: Api) -> dict[str, int]:
    return {worker["id"]: worker["attempt"] for worker in api.get("/v1/workers").json["workers"]}


def test_head_starts_with_one_worker_of_two_and_goes_on_after_15_s_without_cpu_time(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.head() as head, job.worker(1) as second:
        api = job.api(head)
        # Of two slots one has a pod.
        assert {w["id"]: w["ready"] for w in api.get("/v1/workers").json["workers"]} == {"cpu-0": False, "cpu-1": True}
        assert job.take(api)
        with job.worker(0) as first:
            # Takes nothing meanwhile: on a busy machine all frames would be collected before it has started.
            until_all_ready(api)
            assert job.take(api)
            children = psutil.Process(head.process.pid).children(recursive=True)
            # Ray's head proper judges the others.
            frozen = [process for process in children if process.name() != "gcs_server"]
            assert 3 < len(frozen) == len(children) - 1
            for process in frozen:
                process.suspend()
            time.sleep(15)
            for process in frozen:
                process.resume()
            time.sleep(5)  # long enough for either side to give the other up
            for _ in range(5):
                assert job.take(api)
            assert head.process.poll() is None, head.text
            assert [len(worker.said("joined")) for worker in (first, second)] == [1, 1]
            assert not head.said("worker_lost")
            assert (first.end(), second.end()) == (0, 0)


@pytest.mark.timeout(600)
def test_head_ends_in_order_while_connecting_to_ray(tmp_path: Path) -> None:
    job = Job(tmp_path)
    # From the moment at which the head listens until it waits for its workers: nothing tells when Ray has connected.
    for number, delay_s in enumerate((0.0, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 10.0)):
        with job.head(epoch=number + 1) as head:
            api = Api(job.port, f"operator-{TOKEN}")
            until(lambda: answers(f"http://127.0.0.1:{job.port}/livez"), seconds=120)
            time.sleep(delay_s)
            assert api.get("/readyz").status == 503
            assert head.end() == 128 + signal.SIGTERM, (delay_s, head.text)
            assert [line["reason"] for line in head.said("head_ended")] == ["interrupted"]
            assert head.left() == []


NO_DEVICE = (
    "device cuda was requested but torch finds no CUDA device; give the worker group a GPU (resources.limits, on a "
    "node that has one) or set its device: cpu"
)


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_workers_without_a_device_end_the_head_at_its_deadline(tmp_path: Path) -> None:
    job = Job(
        tmp_path, workerGroups=[{"name": "gpu", "device": "gpu"}], replicas=1, runPolicy={"startupDeadlineSeconds": 60}
    )
    with job.head() as head, job.worker(0, group="gpu", CORMORANT_LAST_WORDS=str(tmp_path / "words")) as worker:
        assert worker.wait(280) == 3, worker.text
        assert (tmp_path / "words").read_text() == NO_DEVICE
        assert worker.left() == []
        assert head.process.poll() is None, "another pod may come"
        assert head.wait(90) == 3, head.text
        assert json.loads((tmp_path / "last-words").read_text())["reason"] == f"worker gpu-0 failed: {NO_DEVICE}"


@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_gpu_worker_without_a_device_leaves_the_others_collecting(tmp_path: Path) -> None:
    groups = [{"name": "cpu"}, {"name": "gpu", "device": "gpu", "replicas": 1}]
    job = Job(tmp_path, workerGroups=groups, replicas=1, runPolicy={"maxRestartsPerSlot": 0})

    def lose_one(head: Pod, *, before: int) -> None:
        words = tmp_path / f"words-{before}"
        with job.worker(0, group="gpu", CORMORANT_LAST_WORDS=str(words)) as worker:
            assert worker.wait(280) == 3, worker.text
        assert words.read_text() == NO_DEVICE
        until(lambda: len(head.said("worker_lost")) > before, seconds=120)
        assert head.said("worker_lost")[-1]["reason"] == f"failed: {NO_DEVICE}"

    with job.head() as head:
        lose_one(head, before=0)
        with job.worker(0):
            api = job.api(head)
            assert job.take(api)
            lose_one(head, before=1)
            assert job.take(api)


def test_ending_pod_delivers_its_batch_and_outlives_a_dead_head(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.worker(0) as first, job.worker(1) as second, job.head() as head:
        api = job.api(head)
        publish(api, 1)
        before = attempts(api)
        job.take_all(api, until=1000)
        # The replacement's pod comes while the first one still works, as in a cluster.
        with job.worker(0) as third:
            third.wait_for("joined")
            first.process.send_signal(signal.SIGTERM)
            while first.process.poll() is None:
                assert job.take(api)
            assert first.wait() == 0
            assert first.said("leaving")
            assert first.said("left")
            assert first.left() == []
            until(lambda: job.take(api) and attempts(api).get("cpu-0", 0) > before["cpu-0"])
            assert attempts(api)["cpu-1"] == before["cpu-1"]
            status = api.get("/v1/status").json
            # Nothing was lost: at most what the environments were ahead of the last batch.
            assert status["frames"]["dropped"].get("crash", 0) == 0
            assert not head.said("worker_lost")

            head.kill()
            settled = job.checker.frames
            with job.head(epoch=2, floor_frames=settled) as next_head:
                api = job.api(next_head)
                assert api.put(f"{WEIGHTS}?version=2", weights_file(2), Prefer="wait=60").status in (200, 202)
                job.take_all(api)
                assert next_head.wait() == 0
                assert next_head.left() == []
            assert json.loads((tmp_path / "last-words").read_text()) == {"frames": TOTAL}
            assert second.process.poll() is None
            assert third.process.poll() is None
            assert len(second.said("joined")) == 2
            assert job.checker.frames == TOTAL
            os.kill(second.process.pid, signal.SIGTERM)
            assert second.wait() == 0


def test_unfinished_batch_of_an_ended_pod_is_collected_again(tmp_path: Path) -> None:
    job, grace_s = Job(tmp_path), 8
    given = {"CORMORANT_GRACE_SECONDS": str(grace_s)}
    with job.worker(0, **given) as first, job.worker(1), job.head() as head:
        api = job.api(head)
        publish(api, 1)
        before = attempts(api)
        job.take_all(api, until=500)
        with job.worker(0) as third:
            third.wait_for("joined")
            (actor,) = first.below(ACTOR_TITLE)
            actor.suspend()
            began = time.monotonic()
            assert first.end() == 0
            assert time.monotonic() - began < grace_s, "a kubelet would have killed it"
            (said,) = first.said("left_in_the_middle")
            assert "the batch is collected again" in said["reason"]
            assert first.left() == []
            until(lambda: attempts(api).get("cpu-0", 0) > before["cpu-0"], seconds=60)
            job.take_all(api)
            assert head.wait() == 0
            assert job.checker.frames == TOTAL


def test_new_head_without_a_count_collects_no_acknowledged_frame_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.worker(0), job.worker(1):
        # Nobody tells the heads what was settled: no operator runs, and the termination message went with the pod.
        with job.head() as head:
            api = job.api(head)
            assert api.put(f"{WEIGHTS}?version=1", weights_file(1), Prefer="wait=60").status in (200, 202)
            job.take_all(api, until=1000)
            time.sleep(1.5)  # workers hear of it twice a second
            head.kill()
        with job.head(epoch=2) as head:
            api = job.api(head)
            assert head.wait_for("frames_inherited")["frames"] == job.checker.frames
            until(lambda: api.get("/v1/status").json["frames"]["settled"] == job.checker.frames)
            job.take_all(api, until=2500)
            head.process.send_signal(signal.SIGTERM)  # as a pod that is deleted
            job.take_all(api)
            head.wait()
        with job.head(epoch=3) as head:
            api = job.api(head)
            job.take_all(api)
            assert head.wait() == 0
        assert json.loads((tmp_path / "last-words").read_text()) == {"frames": TOTAL}
        assert job.checker.frames == TOTAL


@pytest.mark.timeout(600)
def test_new_head_takes_the_newest_weights_that_the_workers_kept(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.worker(0) as first, job.worker(1) as second:
        with job.head() as head:
            api = job.api(head)
            until_all_ready(api)
            for version in (1, 40):
                publish(api, version, weights_of(version))
            published = versions(api)[0]
            head.kill()
        # Its folder is empty: there is no volume.
        with job.head(epoch=2) as head:
            api = job.api(head)
            assert head.said("weights_inherited")[0]["version"] == 40
            (found,) = versions(api)
            assert (found["version"], found["digest"]) == (40, published["digest"])
            assert api.get(WEIGHTS).body == weights_of(40)
            # What a learner sees: no older version over it, the same again is no news, and the next one is the next.
            refused = api.put(f"{WEIGHTS}?version=2", weights_file(2))
            assert (refused.status, refused.kind, refused.json["current_version"]) == (409, "version-conflict", 40)
            assert api.put(f"{WEIGHTS}?version=40", weights_of(40)).status == 200
            until(lambda: {worker["version"] for worker in api.get("/v1/workers").json["workers"]} == {40})
            assert job.take(api)
            assert {stream.version for stream in job.checker.streams.values()} == {40}
            assert api.put(WEIGHTS, weights_file(41), Prefer="wait=60").json["version"] == 41
            second.kill()
            head.kill()
            os.kill(first.process.pid, signal.SIGSTOP)
        # A pod that has just come has nothing to offer; the one that was there has, whenever it joins.
        with job.worker(1) as late, job.head(epoch=3, published_version=42) as head:
            api = job.api(head)
            late.wait_for("joined")
            assert versions(api) == []
            os.kill(first.process.pid, signal.SIGCONT)
            until(lambda: [found["version"] for found in versions(api)] == [41], seconds=60)
            until(lambda: {worker["version"] for worker in api.get("/v1/workers").json["workers"]} == {41})
            # Another worker kept 42, and is gone: what acts is older, and the head says so until a learner publishes.
            time.sleep(1.5)
            assert api.condition("WeightsMissing")["status"] == "True"
            assert api.put(WEIGHTS, weights_file(43)).json["version"] == 43
            until(lambda: api.condition("WeightsMissing")["status"] == "False")


def weights_of(version: int) -> bytes:
    """A file with metadata."""
    return b"".join(make_body(numbered(version), metadata={"learner": f"{version}"}).pieces)


def versions(api: Api) -> list[dict[str, object]]:
    """Versions of the policy that the head has, newest first."""
    return list(api.get("/v1/models/policy/versions").json["versions"])
