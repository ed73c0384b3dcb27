"""Operators that die after any write, an API server that refuses, loses and breaks off: the same end, no pod twice."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cormorant_testing.api_proxy import FaultyApi, write_kubeconfig
from cormorant_testing.kubectl import Kubelet
from cormorant_testing.operator_scene import Scene
from cormorant_testing.scripts import until


class Place(Scene):
    """A scene whose operators reach the API server through the proxy."""

    def __init__(self, scene: Scene, api: FaultyApi) -> None:
        kubeconfig = str(write_kubeconfig(scene.folder / "kubeconfig", api.url))
        super().__init__(scene.namespace, scene.folder, heads=scene.heads, kubeconfig=kubeconfig)
        self.proxy = api

    def workers(self) -> str:
        return str(self.status.get("workers", ""))

    def uids_of(self, *, size: int = 99) -> set[str]:
        """The head's, and those of workers that a group of this size keeps, without pods that are being deleted."""
        return {
            pod["metadata"]["uid"]
            for pod in self.namespace.items("pods")
            if int(pod["metadata"]["labels"].get("cormorant.dev/index", -1)) < size
            and "deletionTimestamp" not in pod["metadata"]
        }

    def slots(self) -> Counter[str]:
        pods = self.namespace.items("pods")
        return Counter(
            pod["metadata"]["labels"].get("cormorant.dev/index", "head")
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        )


@pytest.fixture
def place(scene: Scene) -> Iterator[Place]:
    with FaultyApi(seed=7) as api:
        yield Place(scene, api)


def test_operator_killed_after_its_nth_write_for_every_n(place: Place) -> None:
    with Kubelet(place.namespace):
        place.submit(replicas=3)
        assert _die_after_each_write(place, lambda: place.workers() == "3/3", what="three workers") >= 3
        assert place.slots() == Counter({"0": 1, "1": 1, "2": 1, "head": 1})
        # A pod that was created was never created again.
        assert place.proxy.requests["POST", "pods"] == 4 + place.proxy.dry_runs

        victim = place.namespace.names("pods", "cormorant.dev/role=worker")[1]
        untouched = place.uids_of() - {place.uids()[victim]}
        place.namespace("delete", "pod", victim, "--wait=false")
        place.namespace.until(lambda: len(place.slots()) == 3, what="it is gone")
        assert _die_after_each_write(place, lambda: len(place.slots()) == 4, what="its successor") >= 1
        assert untouched <= place.uids_of()

        untouched = place.uids_of(size=1)
        place.namespace("scale", "cjob/pong", "--replicas=1")
        assert _die_after_each_write(place, lambda: place.workers() == "1/1", what="one worker") >= 2
        assert place.uids_of() == untouched

        place.edit(suspend=True)
        deaths = _die_after_each_write(place, lambda: place.stub.phase == "Draining", what="it drains")
        assert place.uids_of() == untouched
        place.namespace.finish("pong-head-1", container="head", exit_code=143)
        deaths += _die_after_each_write(place, lambda: place.status.get("phase") == "Suspended", what="suspended")
        assert deaths >= 2
        assert place.uids_of() == set()
        assert place.proxy.requests["POST", "pods"] == 5 + place.proxy.dry_runs


def test_api_server_that_fails_at_random(place: Place) -> None:
    place.proxy.rate, place.proxy.stream_s = 0.25, 2.0
    with Kubelet(place.namespace), place.operator():
        place.submit(replicas=4)
        _watch_slots(place, lambda: place.workers() == "4/4", what="four workers")
        for round_number in range(3):
            size = 3 + round_number
            victim = place.namespace.names("pods", "cormorant.dev/role=worker")[round_number]
            untouched = place.uids_of(size=size) - {place.uids()[victim]}
            place.namespace("delete", "pod", victim, "--wait=false")
            place.namespace("scale", "cjob/pong", f"--replicas={size}")
            wanted, slots = f"{size}/{size}", {"head", *map(str, range(size))}
            # The numbers alone may be those of a surplus worker that is still ready, and of a slot that is still empty.
            _watch_slots(place, lambda w=wanted, s=slots: (place.workers(), set(place.slots())) == (w, s), what=wanted)
            assert untouched <= place.uids_of(), "no other pod is touched"
        place.proxy.rate, place.proxy.stream_s = 0.0, 0.0
        _watch_slots(place, lambda: len(place.slots()) == 6, what="five workers and a head")
        assert untouched <= place.uids_of()
        assert place.status["epoch"] == 1, "no healthy pod is restarted"
    assert place.proxy.faults > 20


@pytest.mark.parametrize("faults", [["answer lost", "409"], ["409", "409"]], ids=["it exists", "it does not"])
def test_head_of_unknown_creation_keeps_its_epoch(place: Place, faults: list[str]) -> None:
    def judge(request: Any) -> str:
        if request.method != "POST" or not request.path.endswith("/pods") or "dryRun" in request.query:
            return ""
        place.proxy.is_deaf = True  # no watch tells of it
        return faults.pop(0) if faults else ""

    with Kubelet(place.namespace), place.operator():
        time.sleep(4)  # the operator has finished the listings of its start
        place.proxy.judge = judge
        place.submit(replicas=1)
        _watch_slots(place, lambda: len(place.slots()) == 2, what="a head and a worker")
        place.proxy.is_deaf = False
        place.proxy.expire_watches()
        _watch_slots(place, lambda: place.workers() == "1/1", what="one worker")
        place.proxy.is_deaf = True
        (lost,) = place.namespace.names("pods", "cormorant.dev/role=worker")
        place.namespace("delete", "pod", lost, "--force", "--grace-period=0")
        place.proxy.expire_watches()
        _watch_slots(place, lambda: len(place.slots()) == 2, what="a successor", within_s=20)
    assert (place.namespace.names("pods", "cormorant.dev/role=head"), place.status["epoch"]) == (["pong-head-1"], 1)
    assert faults == []


def test_outage_ends_the_leader_and_costs_no_pod(place: Place) -> None:
    lease = ("--lease", f"{place.namespace.name}/operator")
    with Kubelet(place.namespace):
        with place.operator(*lease) as leader:
            place.submit(replicas=3)
            _watch_slots(place, lambda: place.workers() == "3/3", what="three workers")
            victim = place.namespace.names("pods", "cormorant.dev/role=worker")[0]
            untouched = place.uids_of() - {place.uids()[victim]}
            place.proxy.go_away()
            # Its lease lasts 15 s; it gives up before anybody else may lead, and not at the first fault.
            began = time.monotonic()
            assert leader.process.wait(timeout=40) == 1
            assert time.monotonic() - began > 6
        place.namespace("delete", "pod", victim, "--wait=false")
        with place.operator(*lease) as successor:  # as a kubelet starts it anew
            time.sleep(8)
            assert successor.process.poll() is None, "it waits for the API server"
            assert len(place.slots()) == 3
            place.proxy.is_away = False
            _watch_slots(place, lambda: len(place.slots()) == 4, what="the deleted worker's successor")
            assert untouched <= place.uids_of()
            _watch_slots(place, lambda: place.workers() == "3/3", what="three workers again")
            assert place.status["epoch"] == 1


def test_two_operators_without_lease_create_each_pod_once(place: Place) -> None:
    with Kubelet(place.namespace), place.operator(), place.operator():
        place.submit(replicas=4)
        _watch_slots(place, lambda: place.workers() == "4/4", what="four workers")
        for round_number in range(6):
            victim = place.namespace.names("pods", "cormorant.dev/role=worker")[round_number % 4]
            place.namespace("delete", "pod", victim, "--wait=false")
            _watch_slots(place, lambda victim=victim: victim not in place.namespace.names("pods"), what="it is gone")
            _watch_slots(place, lambda: len(place.slots()) == 5, what="four workers and a head")
        assert place.status["epoch"] == 1
        _watch_slots(place, lambda: place.workers() == "4/4", what="all workers are ready")
    # The second of two creations of a name is refused: as many were done as pods were needed.
    assert place.proxy.requests["POST", "pods"] - place.proxy.dry_runs == 5 + 6


def _watch_slots(place: Place, is_so: Callable[[], object], *, what: str, within_s: float = 60.0) -> None:
    """Wait for a fact, and see meanwhile that no slot is ever filled twice."""

    def holds() -> object:
        assert max(place.slots().values(), default=0) <= 1
        return is_so()

    until(holds, seconds=within_s, what=what, every_s=0.2)


def _die_after_each_write(place: Place, is_done: Callable[[], bool], *, what: str) -> int:
    """Operators die after their first write, their second, and so on, until a fact holds. Returns how many died."""
    deaths = 0
    while not is_done():
        assert deaths < 20
        with place.operator() as operator:
            process = operator.process
            # The answer to the write is never heard.
            last = place.proxy.writes + deaths + 1
            place.proxy.after_write = lambda n, last=last, process=process: process.kill() if n >= last else None
            _watch_slots(place, lambda process=process: process.poll() is not None or is_done(), what=what)
            deaths += process.poll() is not None
    place.proxy.after_write = lambda _: None
    return deaths
