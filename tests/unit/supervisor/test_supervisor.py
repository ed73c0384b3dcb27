"""What the supervisor decides, without Ray."""

import json
import select
import socket
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cormorant_contract.metrics import METRICS
from cormorant_testing.scripts import environment, run_script, until
from cormorant_worker.pod_files import PodFile, explain_end
from cormorant_worker.supervisor import ray_command
from cormorant_worker.supervisor.diagnosis import HeadWatch, diagnose
from cormorant_worker.supervisor.probes import PodMetrics, PodProbes, PodState, answer
from cormorant_worker.supervisor.settings import (
    SupervisorRefused,
    read_ray_settings,
    read_termination_path,
    read_worker_settings,
)

WORKER = {
    "CORMORANT_HEAD": "pong-head:6379", "CORMORANT_GROUP": "cpu", "CORMORANT_INDEX": "3",
    "CORMORANT_GRACE_SECONDS": "60", "CORMORANT_OBJECT_STORE_BYTES": f"{1 << 30}", "POD_IP": "10.1.2.3",
}  # fmt: skip
GIB = 1 << 30


def test_worker_starts_ray_with_its_slot_and_a_head_without_a_place_for_workers() -> None:
    command = ray_command.worker_command(read_worker_settings(WORKER))
    assert command[1:6] == ["-m", "ray.scripts.scripts", "start", "--block", "--address=pong-head:6379"]
    assert {
        '--resources={"slot:cpu-3": 1}', "--node-ip-address=10.1.2.3", "--max-worker-port=0", "--num-cpus=1",
        "--num-gpus=0", f"--object-store-memory={GIB}", "--temp-dir=/tmp/ray",
    } <= set(command)  # fmt: skip
    assert not [flag for flag in command if flag.startswith(("--port", "--head"))]
    settings = read_worker_settings({**WORKER, "CORMORANT_HEAD": "[fd00::1]:6379"})
    assert settings.head == ("fd00::1", 6379)
    assert "--address=[fd00::1]:6379" in ray_command.worker_command(settings)
    command = ray_command.head_command(read_ray_settings({"POD_IP": "10.1.2.3"}))
    assert {"--head", "--port=6379", "--include-dashboard=false", "--num-cpus=0"} <= set(command)
    assert not [flag for flag in command if flag.startswith(("--address", "--resources"))]


def test_ray_leaves_devices_alone_and_knows_the_leave_file() -> None:
    settings = read_ray_settings({})
    given = ray_command.ray_environment({"RAY_AUTH_TOKEN": "secret", "RAY_health_check_period_ms": "1"}, settings)
    assert (given["RAY_AUTH_TOKEN"], given["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"]) == ("secret", "0")
    assert (given["RAY_health_check_timeout_ms"], given["RAY_health_check_period_ms"]) == ("10000", "1")
    assert given[PodFile.LEAVE.variable] == str(settings.path(PodFile.LEAVE)) == "/tmp/ray.leave"


def test_what_cannot_be_used_is_refused_with_its_name_and_value() -> None:
    with pytest.raises(SupervisorRefused, match="CORMORANT_HEAD is 'pong-head': invalid literal for int"):
        read_worker_settings({**WORKER, "CORMORANT_HEAD": "pong-head"})
    given = environment(**WORKER | {"CORMORANT_GROUP": ""})
    for arguments, words in (("head --", "write `supervisor"), ("worker", "CORMORANT_GROUP is '': it must be set")):
        command = [sys.executable, "-m", "cormorant_worker.supervisor", *arguments.split()]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)
        told = json.loads(done.stdout)
        assert (done.returncode, told["event"], words in told["reason"]) == (2, "supervisor_refused", True), told


@pytest.mark.parametrize(
    ("limit", "expected"), [(f"{GIB // 2}\n", 0.2 * GIB), ("max", 0.4 * GIB), (f"{1 << 62}", 0.4 * GIB)]
)
def test_object_store_is_bounded_by_the_containers_memory(
    limit: str, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(ray_command, "_MEMORY_LIMITS", (tmp_path / "memory.max", tmp_path / "missing"))
    monkeypatch.setattr(ray_command.shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    assert ray_command.store_bytes() == int(expected)


@pytest.mark.parametrize(
    ("words", "code", "has_joined", "cause"),
    [
        ("ray.exceptions.AuthenticationError: InvalidAuthToken: ...", 1, False, "token"),
        ("RuntimeError: Version mismatch: The cluster was started with:\n  Ray: 2.50.0", 1, False, "version"),
        ("", None, False, "ended"),
        ("GCS returned an authentication error", 1, True, "ended"),
    ],
)
def test_an_end_is_explained(words: str, code: int | None, has_joined: bool, cause: str) -> None:
    found, sentence = diagnose(words, code=code, head="pong-head:6379", has_joined=has_joined)
    assert found == cause
    assert "pong-head:6379" in sentence


def test_probes_tell_the_pods_standing() -> None:
    state = PodState()
    metrics = PodMetrics(state, job="pong", group="cpu")
    paths = ("/livez", "/readyz", "/readyz?wait=0", "/other")
    assert [answer(path, state, metrics)[0] for path in paths] == [200, 503, 503, 404]
    threading.Timer(0.2, lambda: (setattr(state, "is_joined", True), setattr(state, "joins", 1))).start()
    assert answer("/readyz?wait=60", state, metrics)[0] == 200, "a probe waits for the first membership"
    state.is_joined = False
    assert answer("/readyz?wait=60", state, metrics)[0] == 503, "and for no later one"
    state.is_joined = True
    assert answer("/readyz", state, metrics)[:2] == (200, b"ok\n")
    state.is_leaving = True
    assert answer("/readyz", state, metrics)[:2] == (503, b"leaving\n")
    state.ticked -= 61
    assert answer("/livez", state, metrics)[0] == 503


@pytest.mark.parametrize("pod_ip", ["127.0.0.1", "::1"])
def test_probes_listen_on_the_pods_address_family(pod_ip: str) -> None:
    state = PodState()
    with PodProbes(state, PodMetrics(state, job="", group="cpu"), pod_ip=pod_ip, port=0) as probes:
        connection = HTTPConnection(pod_ip, probes.port, timeout=10)
        connection.request("GET", "/livez")
        assert connection.getresponse().status == 200
        connection.close()


def test_head_is_gone_when_its_connection_ends_and_no_other_is_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        watch = HeadWatch(head.getsockname())
        assert watch.connect(limit_s=600) == ""
        first, _ = head.accept()
        assert not watch.is_head_gone(), "a head that says nothing is there: it may have no CPU time"
        first.send(b"settings")
        until(lambda: not watch.is_head_gone())
        first.close()
        until(lambda: not watch.is_head_gone() and select.select([head], [], [], 0)[0], what="another connection")
        second, _ = head.accept()
    second.close()
    until(watch.is_head_gone)
    watch.close()
    assert "refused" in HeadWatch(("127.0.0.1", 1)).connect(limit_s=600)  # longer than a test may take


def test_head_that_accepts_nothing_for_a_while_is_not_gone() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as head:
        watch = HeadWatch(head.getsockname())
        assert watch.connect(limit_s=600) == ""
        first, _ = head.accept()
        # Nobody accepts now: what comes after these two waits without an answer.
        with socket.create_connection(head.getsockname(), timeout=10):
            first.close()
            for _ in range(3):
                assert not watch.is_head_gone(), "silence is no answer"
    until(watch.is_head_gone)
    watch.close()


ORPHANS = """
import subprocess, sys, time
from cormorant_worker.supervisor import pods
pods.adopt_orphans()
child = pods.Ray(["sh", "-c", "sleep 600 & (sleep 0.1 &) ; trap '' TERM; echo ready; sleep 600"],
                 {"PATH": "/usr/bin:/bin"})
names, deadline = [], time.monotonic() + 30
while names != ["sh", "sleep", "sleep"] and time.monotonic() < deadline:
    time.sleep(0.01)
    pods.reap([child])
    names = sorted(process.name() for process in pods.descendants())
print(names)
pods.kill_all([child])
print(child.poll(), pods.descendants(), child.output_tail())
"""


def test_nothing_is_left_as_a_zombie_and_nothing_survives() -> None:
    done = run_script(ORPHANS)
    assert done.stdout.splitlines() == ["['sh', 'sleep', 'sleep']", "137 [] ready"], done.stderr


RAY = """
import sys, time
from cormorant_worker.pod_files import report_blocked
print("Ray runtime started.", flush=True)
report_blocked("device cuda was requested; set its device: cpu")
time.sleep(600)
"""


def test_worker_without_a_device_ends_its_pod_with_a_sentence(tmp_path: Path) -> None:
    scripts = tmp_path / "ray" / "scripts"
    scripts.mkdir(parents=True)
    for file, text in (
        (tmp_path / "ray/__init__.py", ""),
        (scripts / "__init__.py", ""),
        (scripts / "scripts.py", RAY),
    ):
        file.write_text(text)
    (tmp_path / "session.blocked").write_text("of the pod that was here before")
    with socket.create_server(("127.0.0.1", 0)) as head:
        own = {"POD_IP": "127.0.0.1", "CORMORANT_HEAD": f"127.0.0.1:{head.getsockname()[1]}"}
        files = {"CORMORANT_RAY_FOLDER": f"{tmp_path}/session", "CORMORANT_LAST_WORDS": f"{tmp_path}/last-words"}
        variables = environment(**WORKER | own | files, CORMORANT_PROBE_PORT="0")
        variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
        command = [sys.executable, "-m", "cormorant_worker.supervisor", "worker"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stdout + done.stderr
    assert (tmp_path / "last-words").read_text() == "device cuda was requested; set its device: cpu"
    assert '"event": "pod_blocked"' in done.stdout
    assert not (tmp_path / "session.blocked").exists()


def test_rays_end_is_explained_beside_the_count(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    explain_end(path, "Ray has ended", frames=70)
    assert path.read_text() == '{"frames": 70, "reason": "Ray has ended"}'
    for left, then in (
        ('{"frames": 7}', '{"frames": 7, "reason": "Ray has ended"}'),
        ('{"frames": 7, "reason": "no space"}', '{"frames": 7, "reason": "no space"}'),
        ("", ""),
        ("[]", "[]"),
    ):
        path.write_text(left)
        explain_end(path, "Ray has ended")
        assert path.read_text() == then
    assert read_termination_path({}) is None
    explain_end(None, "not written")
    assert read_termination_path({"CORMORANT_LAST_WORDS": "/dev/termination-log"}) == Path("/dev/termination-log")


def test_the_contracts_metrics_are_exported() -> None:
    pod = PodMetrics(PodState(is_joined=True, joins=2), job="pong", group="cpu")
    families = text_string_to_metric_families(pod.text().decode())
    exported = {sample.name: sample.value for family in families for sample in family.samples}
    assert exported.keys() == {metric.name for metric in METRICS["worker"] if not metric.when}
    assert (exported["cormorant_worker_joined"], exported["cormorant_worker_joins_total"]) == (1, 2)
