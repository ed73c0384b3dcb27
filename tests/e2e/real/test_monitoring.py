"""A Prometheus finds a job's pods and the operator as the chart's PodMonitors say: every panel has data.

Pods are found and reached through the API server: none of their addresses need be known to this machine. Debian's
Prometheus is built without a discovery of Kubernetes: a thread writes a file with what it would find.
"""

import contextlib
import itertools
import json
import math
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import safetensors.torch
import yaml

from cormorant.policies import mlp
from cormorant_testing.helm import CHART, POD_MONITOR, Manifest, find, render
from cormorant_testing.kubectl import forward
from cormorant_testing.needs import lacks
from cormorant_testing.real_cluster import RELEASE, Installation
from cormorant_testing.real_job import Job, note, running, small_job
from cormorant_testing.scripts import Repeated, Server, until, unused_port

FILES = CHART / "files"


def targets(monitor: Manifest, proxy: str) -> Iterator[dict[str, Any]]:
    """Each port that a monitor selects of a pod that has an address and has not ended, with the labels that the
    Prometheus operator gives; reached at `proxy`, the API server's address without its credentials.
    """
    own, spec = monitor["metadata"], monitor["spec"]
    for namespace in spec.get("namespaceSelector", {}).get("matchNames", [own["namespace"]]):
        with urllib.request.urlopen(f"http://{proxy}/api/v1/namespaces/{namespace}/pods", timeout=30) as reply:
            pods = json.load(reply)["items"]
        for pod, endpoint in itertools.product(pods, spec["podMetricsEndpoints"]):
            name, status = pod["metadata"]["name"], pod["status"]
            is_chosen = spec["selector"]["matchLabels"].items() <= pod["metadata"].get("labels", {}).items()
            if not is_chosen or not status.get("podIP") or status["phase"] in ("Failed", "Succeeded"):
                continue
            for container in pod["spec"]["containers"]:
                ports = container.get("ports", ())
                for number in (p["containerPort"] for p in ports if p.get("name") == endpoint["port"]):
                    path = f"/api/v1/namespaces/{namespace}/pods/{name}:{number}/proxy{endpoint['path']}"
                    labels = {
                        "__metrics_path__": path, "job": f"{own['namespace']}/{own['name']}",
                        "instance": f"{status['podIP']}:{number}", "endpoint": endpoint["port"],
                        "namespace": namespace, "pod": name, "container": container["name"],
                    }  # fmt: skip
                    yield {"targets": [proxy], "labels": labels}


class Prometheus(Server):
    """A real one of this machine, which scrapes every 2 s; skips the test where there is none."""

    def __init__(self, folder: Path, targets: Path) -> None:
        if shutil.which("prometheus") is None:
            lacks("prometheus", "no prometheus on the PATH: nothing is scraped (Debian: apt-get install prometheus)")
        config = {
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": "pods", "file_sd_configs": [{"files": [str(targets)]}]}],
            "rule_files": [str(FILES / "rules" / "cormorant.yaml")],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{unused_port()}"
        self._url = f"http://{address}"
        command = [
            *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address={address}", "--query.lookback-delta=30s"),
        ]
        super().__init__(command, f"{self._url}/-/ready")

    def query(self, expr: str, *, at: float | None = None) -> dict[tuple[tuple[str, str], ...], float]:
        asked = urllib.parse.urlencode({"query": expr} | ({"time": str(at)} if at is not None else {}))
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/query?{asked}", timeout=30) as response:
                data = json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        if data["resultType"] == "scalar":
            return {(): float(data["result"][1])}
        return {tuple(sorted(row["metric"].items())): float(row["value"][1]) for row in data["result"]}

    def numbers(self, expr: str) -> list[float]:
        return [value for value in self.query(expr).values() if not math.isnan(value)]

    def wait_for_numbers(self, expr: str, *, seconds: float = 60) -> list[float]:
        until(lambda: self.numbers(expr), seconds=seconds, what=f"{expr} gives nothing")
        return self.numbers(expr)


NEED_MORE = {"GPU utilization", "GPU memory"}
"""Panels of cormorant-job that need a device."""
NEED_MORE |= {"Environments acted for per second", "Environments per call of the policy", "Wait and act"}
"""Those that need inference servers."""
MANIFEST = small_job(
    "watched",
    {
        "gymnasium": {"id": "CartPole-v1", "vectorization": "inline", "numEnvs": 4},
        # With variants, episodes are reported by variant, too.
        "variants": [{"name": "plain"}, {"name": "sutton", "kwargs": {"sutton_barto_reward": True}}],
    },
    policy="cormorant.policies:mlp",
    collection={"framesPerBatch": 128, "totalFrames": 10**8, "normalize": {"observation": {}, "reward": {}}},
    output={"queue": {"capacityBatches": 4}},
)


@pytest.fixture(scope="module")
def job(installed: Installation) -> Iterator[Job]:
    """It collects for a learner, which takes batches and publishes weights on its own connection."""
    env = gymnasium.make("CartPole-v1")
    weights = safetensors.torch.save(mlp(env.observation_space, env.action_space).state_dict())
    with running(installed.jobs, MANIFEST) as job, contextlib.ExitStack() as ends:
        learner = Job(job.namespace, job.name)
        ends.callback(learner.disconnect)

        def learn() -> None:
            try:
                api, until_s = learner.api(), time.monotonic() + 30
                while time.monotonic() < until_s:
                    for _ in range(20):
                        assert api.take(wait=1, consumer="learner").status < 500
                    api.put("/v1/models/policy/weights", weights, Prefer="wait=10")
            except (OSError, HTTPException, AssertionError):
                learner.disconnect()  # a port-forward ends with its pod, at any byte

        with Repeated(learn, every_s=0.1):
            job.until_ready()
            yield job


@pytest.fixture(scope="module")
def db(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    manifests = render(f"watchNamespaces={{{installed.jobs.name}}}", namespace=RELEASE, apis=(POD_MONITOR,))
    monitors = [find(manifests, "PodMonitor", name) for name in (RELEASE, f"{RELEASE}-jobs")]
    found = folder / "pods.json"
    process, port = forward("proxy", "--address=127.0.0.1", "--port=0")

    def look() -> None:
        groups = [group for monitor in monitors for group in targets(monitor, f"127.0.0.1:{port}")]
        fresh = found.with_suffix(".new")
        fresh.write_text(json.dumps(groups))
        fresh.replace(found)

    try:
        look()
        # The API server is busy: what is known stays.
        with Repeated(look, every_s=1.0, unless=(OSError,)), Prometheus(folder, found) as db:
            yield db
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_each_pod_is_found_and_scraped_once(job: Job, db: Prometheus, installed: Installation) -> None:
    operators = {pod["metadata"]["name"] for pod in installed.operators.items("pods")}
    expected = sorted([*operators, *job.pods()])

    def scraped() -> list[str]:
        return sorted(dict(labels)["pod"] for labels, value in db.query("up").items() if value == 1)

    with contextlib.suppress(AssertionError):
        job.namespace.until(lambda: scraped() == expected, what="all are scraped", within_s=60)
    assert scraped() == expected


def panels(dashboard: str) -> list[tuple[str, str]]:
    """Titles and queries of the panels that this job has data for."""
    rows = json.loads((FILES / "dashboards" / f"{dashboard}.json").read_text())["panels"]
    found = [*rows, *(panel for row in rows for panel in row.get("panels", ()))]  # those of closed rows stand in them
    needs_more = NEED_MORE if dashboard == "cormorant-job" else ()
    found = [panel for panel in found if panel["title"] not in needs_more]
    return [(panel["title"], target["expr"]) for panel in found for target in panel.get("targets", ())]


@pytest.mark.parametrize("dashboard", ["cormorant-fleet", "cormorant-job", "cormorant-operator"])
def test_every_panel_of_a_dashboard_has_data(job: Job, db: Prometheus, installed: Installation, dashboard: str) -> None:
    db.wait_for_numbers('cormorant_weight_updates_total{result="applied"} > 3', seconds=180)
    chosen = {
        "__rate_interval": "1m",  # what Grafana makes of it where scrapes are 15 s apart
        "job_namespace": job.namespace.name,
        "namespace": RELEASE if dashboard == "cormorant-operator" else job.namespace.name,
        "collectorjob": job.name,
        "group": "cpu",
    }
    asked = {
        (title, re.sub(r"\$(\w+)", lambda variable: chosen[variable[1]], expr)) for title, expr in panels(dashboard)
    }
    assert asked

    def empty() -> set[tuple[str, str]]:
        return {(title, expr) for title, expr in asked if not db.numbers(expr)}

    job.edit(paused=True)  # the operator looks at a change
    job.until(lambda: job.condition("Paused") == "True/Spec", what="the job is paused")
    job.edit(paused=False)
    try:
        job.namespace.until(lambda: not empty(), what="every panel has data", within_s=180)
    except AssertionError as late:
        raise AssertionError(f"{dashboard} has no data for {empty()}") from late
    note(f"{dashboard}: {len(asked)} queries have data")


def test_no_alert_fires_for_a_job_that_is_well(job: Job, db: Prometheus) -> None:
    db.wait_for_numbers(f'collectorjob:cormorant_stepped_frames:rate2m{{collectorjob="{job.name}"}}', seconds=120)
    assert db.query('ALERTS{alertstate="firing"}') == {}


def stand_still(job: Job) -> int:
    """Pause, and wait until the count of frames no longer grows. Returns it."""
    job.edit(paused=True)
    job.until(lambda: job.ask("/v1/status").json["pause_state"] == "paused", what="the fleet is paused")
    before, count = -1, 0
    while before != count:
        time.sleep(2.0)
        before, count = count, int(job.ask("/v1/status").json["frames"]["collected"])
    return count


def end_a_worker(job: Job) -> None:
    job.replace_worker()
    job.until_ready()


def kill_the_head(job: Job) -> None:
    epoch = job.status["epoch"]
    job.kill(job.head(), "cormorant_api")
    job.disconnect()
    job.until(lambda: job.status["epoch"] == epoch + 1, what="the next epoch")
    job.until(lambda: job.ask("/v1/status").status == 200, what="the next head collects")


@pytest.mark.parametrize("death", [end_a_worker, kill_the_head])
def test_frame_increase_is_exact_over_a_death(job: Job, db: Prometheus, death: Callable[[Job], None]) -> None:
    frames = f'cormorant_frames_total{{namespace="{job.namespace.name}", collectorjob="{job.name}"}}'
    # Another head is another pod, and goes on with the count of the one before.
    counted = f"max without (pod, instance) ({frames})"
    job.edit(paused=False)
    first = stand_still(job)
    time.sleep(4.0)
    began = time.time()
    job.edit(paused=False)
    job.until(lambda: max(db.numbers(frames), default=0) > first + 10_000, what="frames again")
    death(job)
    before = max(db.numbers(counted), default=0)
    job.until(lambda: max(db.numbers(counted), default=0) > before + 10_000, what="it collects")
    last = stand_still(job)
    time.sleep(4.0)
    # Steps are whole seconds: the window begins and ends with one, or increase() would stretch what it saw.
    ended = int(time.time())
    window = f"{(ended - int(began)) * 1000 + 1}ms:1s"
    (increase,) = db.query(f"increase({counted}[{window}])", at=ended).values()
    note(f"increase() says {increase:.0f} frames, the API {last - first}")
    assert increase == pytest.approx(last - first, rel=0.01)
    job.edit(paused=False)
