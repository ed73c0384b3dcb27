"""Operators that die after any write, an API server that refuses, loses and breaks off: the same end, no pod twice."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cormorant_testing.faulty_api import FaultyApi
from cormorant_testing.kubectl import Kubelet, Namespace, apply_crd, skip_without_cluster
from cormorant_testing.operator_world import make_spec
from cormorant_testing.stub_heads import StubHeads

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture
def api() -> Iterator[FaultyApi]:
    skip_without_cluster()
    apply_crd()
    with FaultyApi(seed=7) as faulty:
        yield faulty


class Place:
    """A namespace, its heads, and operators that reach the API server through the proxy."""

    def __init__(self, namespace: Namespace, heads: StubHeads, api: FaultyApi, folder: Path) -> None:
        self.namespace, self.api, self.folder = namespace, api, folder
        key = folder / "key"
        key.write_text("0123456789abcdef" * 4)
        self._arguments = [
            *("--image", "example/cormorant:1", "--key-file", str(key), "--namespace", namespace.name),
            *("--head-url", heads.url, "--poll-seconds", "1", "--probe-port", "0"),
        ]
        self._config = str(api.write_kubeconfig(folder / "kubeconfig"))

    @contextmanager
    def operator(self) -> Iterator["subprocess.Popen[bytes]"]:
        log = self.folder / "operator.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "cormorant_operator", *self._arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "KUBECONFIG": self._config},
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait(timeout=10)
            sys.stdout.write(log.read_text()[-3000:])

    def submit(self, *, replicas: int) -> None:
        manifest = {
            "apiVersion": "cormorant.dev/v1alpha1",
            "kind": "CollectorJob",
            "metadata": {"name": "pong"},
            "spec": make_spec(replicas=replicas),
        }
        self.namespace("apply", "-f", "-", document=manifest)

    def workers(self) -> str:
        return str((self.namespace.get("cjob", "pong").get("status") or {}).get("workers", ""))

    def slots(self) -> Counter[str]:
        pods = self.namespace.items("pods")
        return Counter(
            pod["metadata"]["labels"].get("cormorant.dev/index", "head")
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        )


@pytest.fixture
def place(api: FaultyApi, tmp_path: Path) -> Iterator[Place]:
    with StubHeads() as heads, Namespace("faults") as namespace:
        yield Place(namespace, heads, api, tmp_path)


def test_operator_killed_after_its_nth_write_for_every_n(place: Place) -> None:
    with Kubelet(place.namespace):
        place.submit(replicas=3)
        deaths = 0
        while place.workers() != "3/3":
            assert deaths < 20
            with place.operator() as process:
                # The answer to the write is never heard.
                last = place.api.writes + deaths + 1
                place.api.after_write = lambda n, last=last, process=process: process.kill() if n >= last else None
                try:
                    process.wait(timeout=12)
                except subprocess.TimeoutExpired:
                    break  # there was nothing left to write
                deaths += 1
        place.api.after_write = lambda _: None
        with place.operator():
            place.namespace.until(lambda: place.workers() == "3/3", what="all workers are ready")
        assert place.slots() == Counter({"0": 1, "1": 1, "2": 1, "head": 1})
        assert deaths >= 3
        # A pod that was created was never created again.
        assert place.api.requests["POST", "pods"] == 4 + place.api.dry_runs


def test_api_server_that_fails_at_random(place: Place) -> None:
    place.api.rate, place.api.stream_s = 0.25, 2.0
    with Kubelet(place.namespace), place.operator():
        place.submit(replicas=4)
        _watch_slots(place, lambda: place.workers() == "4/4", what="four workers")
        for round_number in range(3):
            victims = place.namespace.names("pods", "cormorant.dev/role=worker")
            place.namespace("delete", "pod", victims[round_number], "--wait=false")
            place.namespace("scale", "cjob/pong", f"--replicas={3 + round_number}")
            wanted = f"{3 + round_number}/{3 + round_number}"
            _watch_slots(place, lambda wanted=wanted: place.workers() == wanted, what=wanted)
        place.api.rate, place.api.stream_s = 0.0, 0.0
        _watch_slots(place, lambda: len(place.slots()) == 6, what="five workers and a head")
        assert place.namespace.get("cjob", "pong")["status"]["epoch"] == 1, "no healthy pod is restarted"
    assert place.api.faults > 20


def test_pod_that_vanished_while_the_watches_were_too_old_is_replaced_at_once(place: Place) -> None:
    with Kubelet(place.namespace), place.operator():
        place.submit(replicas=3)
        _watch_slots(place, lambda: place.workers() == "3/3", what="three workers")
        time.sleep(4)  # what the operator lists anew because it has begun is behind it
        place.api.is_deaf = True
        victim = place.namespace.names("pods", "cormorant.dev/role=worker")[0]
        place.namespace("delete", "pod", victim, "--force", "--grace-period=0")
        place.api.expire_watches()
        _watch_slots(place, lambda: len(place.slots()) == 4, what="its successor", within_s=20)


def test_two_operators_at_once_without_a_lease_make_every_pod_once(place: Place) -> None:
    with Kubelet(place.namespace), place.operator(), place.operator():
        place.submit(replicas=4)
        _watch_slots(place, lambda: place.workers() == "4/4", what="four workers")
        for round_number in range(6):
            victim = place.namespace.names("pods", "cormorant.dev/role=worker")[round_number % 4]
            place.namespace("delete", "pod", victim, "--wait=false")
            _watch_slots(place, lambda victim=victim: victim not in place.namespace.names("pods"), what="it is gone")
            _watch_slots(place, lambda: len(place.slots()) == 5, what="four workers and a head")
        assert place.namespace.get("cjob", "pong")["status"]["epoch"] == 1
        _watch_slots(place, lambda: place.workers() == "4/4", what="all workers are ready")
    # The second of two creations of a name is refused: as many were done as pods were needed.
    assert place.api.requests["POST", "pods"] - place.api.dry_runs == 5 + 6


def _watch_slots(place: Place, is_so: object, *, what: str, within_s: float = 60.0) -> None:
    """Wait for a fact, and see meanwhile that no slot is ever filled twice."""
    assert callable(is_so)
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        assert max(place.slots().values(), default=0) <= 1
        if is_so():
            return
        time.sleep(0.2)
    raise AssertionError(f"not within {within_s:.0f} s: {what}")
