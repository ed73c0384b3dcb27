"""A real Prometheus scrapes a real job: every panel of its dashboards has data, and its counters are the API's."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy
import yaml

from cormorant_testing.heads import HeadProcess
from cormorant_testing.prometheus import Prometheus
from cormorant_testing.promql import substitute
from cormorant_testing.scripts import unused_port
from cormorant_testing.serving import Api
from cormorant_worker.collect.timing import Timing
from cormorant_worker.supervisor.probes import PodMetrics, PodProbes, PodState
from cormorant_worker.worker.heartbeat import Heartbeat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
FILES = Path(__file__).resolve().parents[3] / "charts" / "cormorant" / "files"
WHERE = {"namespace": "team-a", "pod": "cart-head-1"}
NEED_A_GPU = {"GPU utilization", "GPU memory"}
NEED_SERVERS = {"Environments acted for per second", "Environments in one act", "Wait and act"}
JOB = {
    "apiVersion": "cormorant.dev/v1alpha1",
    "kind": "CollectorJob",
    "metadata": {"name": "cart", "namespace": "team-a"},
    "spec": {
        "env": {
            "gymnasium": {"id": "CartPole-v1", "vectorization": "inline", "numEnvs": 4},
            # With variants, episodes are reported by variant, too.
            "variants": [{"name": "plain"}, {"name": "sutton", "kwargs": {"sutton_barto_reward": True}}],
        },
        "policy": {"entrypoint": "cormorant.policies:mlp"},
        "collection": {
            "mode": "async",
            "framesPerBatch": 128,
            "totalFrames": 100_000_000,
            "normalize": {"observation": {}, "reward": {}},
        },
        "output": {"queue": {"capacityBatches": 4}},
        "workerGroups": [{"name": "cpu", "device": "cpu", "maxReplicas": 4}],
    },
}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


class Learner:
    """Takes batches and publishes weights, whatever becomes of the head."""

    def __init__(self, token: str, port: int, *, publishes: bool) -> None:
        self.api = Api(port, token)
        self._publishes = publishes
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._take, args=(i,)) for i in range(2)]

    def __enter__(self) -> "Learner":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _take(self, number: int) -> None:
        while not self._ended.wait(0.01):
            with contextlib.suppress(OSError, AssertionError, KeyError):
                self.api.take(wait=1, consumer="learner")
                if self._publishes and number == 0:
                    self.publish()

    def publish(self) -> None:
        model = self.api.get("/v1/models/policy").json
        arrays = {
            tensor["name"]: np.zeros(tensor["shape"], tensor["dtype"].replace("F32", "float32"))
            for tensor in model["tensors"]
        }
        self.api.put("/v1/models/policy/weights", safetensors.numpy.save(arrays), Prefer="wait=10")


@contextlib.contextmanager
def worker_pod(folder: Path) -> Iterator[int]:
    """What a worker's pod exports, over a heartbeat that beats. Yields its port."""
    state = PodState(is_joined=True, joins=1)
    path = folder / "pulse"
    pulse = Heartbeat.create(str(path))
    Timing(pulse.timing)
    probes = PodProbes(
        state, PodMetrics(state, job="cart", group="cpu", heartbeat_file=path), pod_ip="127.0.0.1", port=0
    )
    try:
        yield probes.port
    finally:
        probes.close()


def panels(name: str) -> Iterator[tuple[str, str]]:
    dashboard = json.loads((FILES / "dashboards" / f"{name}.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def token_of(head: HeadProcess) -> str:
    token: str = json.loads(Path(head.wait_for("head_ready")["token_file"]).read_text())["operator"]
    return token


def test_every_panel_of_a_jobs_dashboards_has_data(manifest: Path, tmp_path: Path) -> None:
    port = unused_port()
    with (
        HeadProcess(manifest, tmp_path / "head", "--port", str(port), "--data-port", "0") as head,
        worker_pod(tmp_path) as pod_port,
    ):
        targets = {
            f"127.0.0.1:{port}": WHERE,
            f"127.0.0.1:{pod_port}": {"namespace": "team-a", "pod": "cart-cpu-0-abcde"},
        }
        rules = FILES / "rules" / "cormorant.yaml"
        with (
            Learner(token_of(head), port, publishes=True),
            Prometheus(tmp_path / "prometheus", targets, rules=rules) as db,
        ):
            db.wait_for('cormorant_weight_updates_total{result="applied"} > 3', seconds=120)
            time.sleep(12)
            chosen = {"__rate_interval": "10s", "namespace": ".*", "collectorjob": "cart", "group": ".*"}
            empty = {
                (name, title, expr)
                for name in ("cormorant-job", "cormorant-fleet")
                for title, expr in panels(name)
                if not db.numbers(substitute(expr, **chosen)) and title not in NEED_A_GPU | NEED_SERVERS
            }
            assert empty == set()
            assert db.numbers('ALERTS{alertstate="firing"}') == []
            for record in ("collectorjob:cormorant_running:bool", "collectorjob:cormorant_stepped_frames:rate2m"):
                db.wait_for(record, seconds=60)


def frames_of(api: Api) -> int:
    return int(api.get("/v1/status").json["frames"]["collected"])


def stand_still(api: Api) -> int:
    """Pause, and wait until the count of frames no longer grows."""
    assert api.post("/v1/pause").status == 200
    before, count = -1, frames_of(api)
    while before != count:
        time.sleep(1.0)
        before, count = count, frames_of(api)
    return count


def worker_pids(api: Api) -> list[int]:
    return [worker["pid"] for worker in api.get("/v1/workers").json["workers"] if worker["ready"]]


def test_frame_metrics_agree_with_the_api_over_deaths(manifest: Path, tmp_path: Path) -> None:
    port, folder = unused_port(), tmp_path / "head"
    options = ("--port", str(port), "--data-port", "0")
    targets: dict[str, Any] = {f"127.0.0.1:{port}": WHERE}
    with Prometheus(tmp_path / "prometheus", targets, interval="200ms") as db, contextlib.ExitStack() as heads:
        head = heads.enter_context(HeadProcess(manifest, folder, *options))
        token = token_of(head)
        api = Api(port, token)
        learner = heads.enter_context(Learner(token, port, publishes=False))
        first = stand_still(api)
        time.sleep(1.0)
        began = time.time()
        time.sleep(1.0)
        api.post("/v1/resume")
        time.sleep(8)
        (pid, *_) = worker_pids(api)
        psutil.Process(pid).kill()
        db.wait_for('cormorant_worker_restarts_total{reason="crash"} > 0')
        while not worker_pids(api):
            time.sleep(0.2)
        time.sleep(8)
        counted = max(db.numbers("cormorant_frames_total"))
        head.kill()
        head = heads.enter_context(HeadProcess(manifest, folder, *options))
        head.wait_for("head_ready")
        db.wait_for(f"cormorant_frames_total > {counted + 2000}", seconds=60)
        last = stand_still(learner.api)
        time.sleep(1.0)
        # From sample to sample: increase() would stretch what it saw to the edges of the window.
        first_at, *_, last_at = db.times("cormorant_frames_total", began=began, ended=time.time())
        window = f"{(last_at - first_at) * 1000 + 1:.0f}ms"
        (increase,) = db.query(f"increase(cormorant_frames_total[{window}])", at=last_at).values()
        assert last - first > 4000
        assert increase == pytest.approx(last - first, rel=0.01)
        (resets,) = db.query(f"resets(cormorant_frames_total[{window}])", at=last_at).values()
        assert resets == 0, "a counter went back"
