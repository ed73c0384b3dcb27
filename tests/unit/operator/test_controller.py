"""What the loop looks at again, and when: answers that tell nothing new are not decided about."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from cormorant_contract.rest.control import Desired
from cormorant_operator.controller import Controller
from cormorant_operator.errors import HeadSilent, TokenRefused
from cormorant_operator.job import Job
from cormorant_operator.job_state import HeadAnswer
from cormorant_operator.pods import Pod
from cormorant_operator.settings import OperatorDefaults
from cormorant_testing.api_server import SINCE, ApiServer
from cormorant_testing.clock import Clock
from cormorant_testing.operator_world import BEGIN, make_spec
from manifest_making import collector_job

pytestmark = pytest.mark.anyio
SITE = OperatorDefaults(poll_s=0.1, fast_poll_s=0.1, resync_retry_s=0.1)


class Api(ApiServer):
    """Pods are ready at once."""

    is_starting = False
    """Pods have a node, and do not become ready."""
    counters_held = 0
    counters_hang: asyncio.Event | None = None
    """The next status write waits for it."""

    def keep(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        if manifest["kind"] == "Pod":
            placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": SINCE}
            conditions = [placed, {**placed, "type": "Ready", "status": "False" if self.is_starting else "True"}]
            manifest = {**manifest, "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions}}
        return super().keep(manifest)

    async def apply_status(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        if (hang := self.counters_hang) is not None:
            self.counters_held, self.counters_hang = 1, None
            await hang.wait()
        return await super().apply_status(manifest)

    @property
    def refused_secrets(self) -> int:
        """Dry runs of a Secret that exists."""
        return self.requests.count("TRY pong-tokens") if ("Secret", "pong-tokens") in self.stored else 0


class Head:
    """Says what it is asked to say, and does what it is told, if it likes."""

    def __init__(self) -> None:
        self.answer = HeadAnswer(pod_uid="uid-of-Pod-pong-head-1", phase="Running", frames=10, sizes={"cpu": 2})
        self.is_silent = self.is_deaf = self.is_refusing = False
        self.asked = self.told = 0

    async def ask(self, job: Job, head: Pod) -> HeadAnswer:
        self.asked += 1
        if self.is_silent:
            raise HeadSilent("it does not answer")
        if self.is_refusing:
            raise TokenRefused("401")
        return self.answer

    async def set_desired(self, job: Job, head: Pod, desired: Desired) -> None:
        self.told += 1
        if self.is_deaf:
            raise HeadSilent("it does not take it")
        self.answer = replace(
            self.answer,
            sizes=desired.groups,
            empty_slots=desired.empty_slots,
            is_spec_paused=bool(desired.paused),
        )


class Scene:
    """A controller with one job of two workers that run."""

    def __init__(self, *namespaces: str, defaults: OperatorDefaults = SITE) -> None:
        self.api, self.head = Api(), Head()
        self.controller = self.operator(*namespaces, defaults=defaults)

    def operator(self, *namespaces: str, defaults: OperatorDefaults = SITE) -> Controller:
        api: Any = self.api
        return Controller(api, self.head, key=b"k" * 32, defaults=defaults, namespaces=namespaces)

    def edit(self, *, generation: int = 1, **spec: Any) -> None:
        self.controller.notice(self.submit("pong", namespace="a", uid="j", generation=generation, **spec))

    def submit(self, name: str, *, namespace: str, uid: str, generation: int = 1, **spec: Any) -> dict[str, Any]:
        job = collector_job(name, make_spec(**spec), namespace=namespace, uid=uid, generation=generation)
        return self.api.keep(job)

    @property
    def decided(self) -> float:
        """How often the job was looked at."""
        text = self.controller.metrics.text()
        return float(re.search(r'reconcile_duration_seconds_count{handler="reconcile"} (\S+)', text.decode())[1])

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.api.stored["CollectorJob", "pong"].get("status") or {})

    def condition(self, kind: str) -> dict[str, Any]:
        (found,) = [condition for condition in self.status["conditions"] if condition["type"] == kind]
        return dict(found)

    def pods(self) -> set[str]:
        """Uids of the job's pods, as the operator has seen them."""
        return {pod.uid for pod in self.controller.cache.record("j").pods}

    @asynccontextmanager
    async def working(self, controller: Controller | None = None) -> AsyncIterator[None]:
        task = asyncio.create_task((controller or self.controller).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():
                await asyncio.sleep(0.005)

    async def until_asked(self, times: int) -> None:
        wanted = self.head.asked + times
        await self.until(lambda: self.head.asked >= wanted)


@pytest.fixture(autouse=True)
async def waits_take_no_time(leaping: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cormorant_operator.controller.now_utc", lambda: BEGIN + timedelta(seconds=leaping.now))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """Its job runs, and its head has answered."""
    scene = Scene()
    scene.edit()
    async with scene.working():
        await scene.until(lambda: scene.status.get("phase") == "Running")
        await scene.until(lambda: scene.status["frames"]["collected"] == 10)
        await scene.until_asked(2)
        yield scene


async def test_operator_that_stood_still_begins_its_deadlines_again(clock: Clock) -> None:
    scene = Scene(defaults=replace(SITE, stood_still_s=1.2))
    scene.api.is_starting = True
    scene.edit(runPolicy={"startupDeadlineSeconds": 1})
    async with scene.working():
        await scene.until(lambda: scene.status.get("phase") == "Starting")
        clock.now += 1.5  # the process does not run for longer than the deadline
        await asyncio.sleep(0.2)
        assert scene.status["phase"] == "Starting"
        await scene.until(lambda: scene.status["phase"] == "Failed")


async def test_answers_that_tell_nothing_new_are_not_decided_about(scene: Scene) -> None:
    decided = scene.decided
    await scene.until_asked(10)
    # Time alone changes something once: that frames no longer grow is said.
    assert scene.decided <= decided + 2
    scene.head.answer = replace(scene.head.answer, version=3)
    await scene.until(lambda: scene.status["weights"]["version"] == 3)


async def test_rejected_token_recreates_a_deleted_secret(scene: Scene) -> None:
    del scene.api.stored["Secret", "pong-tokens"]  # nothing tells the operator: it may not look
    scene.head.is_refusing = True
    await scene.until(lambda: ("Secret", "pong-tokens") in scene.api.stored)
    found = scene.condition("Progressing")
    assert (found["status"], found["reason"]) == ("Unknown", "TokenRefused")
    assert scene.controller.head_states == Counter(refusing=1)
    scene.head.is_refusing = False
    await scene.until(lambda: scene.controller.head_states == Counter(answering=1))


async def test_head_of_a_deleted_job_does_not_count(scene: Scene) -> None:
    scene.head.is_silent = True
    await scene.until(lambda: scene.controller.head_states == Counter(silent=1))
    scene.controller.notice(scene.api.stored.pop(("CollectorJob", "pong")), is_deleted=True)
    await scene.until(lambda: scene.controller.head_states.total() == 0)


async def test_ignored_command_is_resent_after_a_delay(scene: Scene) -> None:
    scene.head.is_deaf = True
    told = scene.head.told
    scene.edit(generation=2, paused=True)
    began = asyncio.get_running_loop().time()
    await scene.until(lambda: scene.head.told >= told + 5)
    assert asyncio.get_running_loop().time() - began > 2 * SITE.fast_poll_s
    scene.head.is_deaf = False
    await scene.until(lambda: scene.head.answer.is_spec_paused)


async def test_refused_change_is_said_and_holds_up_nothing_else(scene: Scene) -> None:
    scene.api.refused["PATCH"] = 403
    # The worker beyond the new size cannot be marked; the head is told of the size and of the pause all the same.
    scene.edit(generation=2, replicas=1, paused=True)
    await scene.until(lambda: scene.head.answer.is_spec_paused)
    await scene.until(lambda: scene.condition("Accepted")["reason"] == "Forbidden")
    pod = next(name for kind, name in scene.api.stored if name.startswith("pong-cpu-1-"))
    assert scene.condition("Accepted")["message"] == f"cannot change Pod {pod}: {pod} is not to be touched"
    await scene.until(lambda: scene.status["phase"] == "Paused")
    patches = scene.api.asked("PATCH")
    await scene.until_asked(5)
    assert scene.api.asked("PATCH") <= patches + 1


async def test_next_operator_asks_for_no_secret_that_a_head_has(scene: Scene) -> None:
    refused = scene.api.refused_secrets
    successor = scene.operator()
    async with scene.working(successor):
        await scene.until(lambda: successor.head_states["answering"] == 1)
        await asyncio.sleep(3 * SITE.poll_s)
        assert scene.api.refused_secrets == refused


async def test_full_list_that_failed_is_tried_again_soon(scene: Scene) -> None:
    scene.api.is_away = True
    before = scene.pods()
    victim = next(key for key in scene.api.stored if key[1].startswith("pong-cpu-0-"))
    del scene.api.stored[victim]  # and no watch tells of it
    first = scene.api.lists
    scene.controller.want_resync()
    await scene.until(lambda: scene.api.lists >= first + 2)
    for _ in range(10):  # watches break again and again meanwhile
        scene.controller.want_resync()
        await asyncio.sleep(0.01)
    lists = scene.api.lists
    for _ in range(5):
        await asyncio.sleep(SITE.resync_retry_s)
    assert scene.api.lists - lists <= 10
    scene.api.is_away = False
    await scene.until(lambda: len(scene.pods() - before) == 1)
    assert victim not in scene.api.stored


async def test_condition_overtakes_waiting_counters(scene: Scene) -> None:
    api = scene.api
    await scene.until(lambda: scene.condition("Progressing")["reason"] == "NoFrames")
    hang = api.counters_hang = asyncio.Event()
    scene.head.answer = replace(scene.head.answer, version=3)  # a counter, and no condition
    await scene.until(lambda: api.counters_held == 1)
    scene.edit(generation=2, paused=True)
    await scene.until(lambda: scene.status.get("phase") == "Paused")
    hang.set()
    await scene.until(lambda: api.conflicts == 1)
    assert scene.status["phase"] == "Paused"


async def test_glance_finds_that_all_pods_went_unseen(scene: Scene) -> None:
    before = scene.pods()
    for key in [key for key in scene.api.stored if key[0] == "Pod"]:
        del scene.api.stored[key]  # and no watch tells of it
    await scene.controller.resync(is_quick=True)
    await scene.until(lambda: len(scene.pods() - before) == 3)


async def test_list_that_begins_again_shows_what_is_left(scene: Scene) -> None:
    before, list_once = scene.pods(), scene.api.list
    victim = next(key for key in scene.api.stored if key[1].startswith("pong-cpu-0-"))

    async def list_twice(kind: str, **options: str) -> AsyncIterator[tuple[list[dict[str, Any]], str]]:
        async for page in list_once(kind, **options):
            yield page
        if kind == "Pod":  # the version of the next page is gone
            scene.api.remove(*victim)
            async for page in list_once(kind, **options):
                yield page

    scene.api.list = list_twice  # type: ignore[method-assign]
    await scene.controller.resync()
    await scene.until(lambda: len(scene.pods() - before) == 1)


async def test_glance_reads_no_third_page_and_asks_for_no_secret(scene: Scene) -> None:
    before = scene.controller.cache.record("j").pods
    refused = scene.api.refused_secrets
    scene.api.page = 1
    scene.api.pages.clear()
    await scene.controller.resync(is_quick=True)
    await asyncio.sleep(3 * SITE.poll_s)
    assert scene.api.pages["Pod"] == 2
    assert scene.controller.cache.record("j").pods == before
    assert scene.api.refused_secrets == refused


async def test_lost_namespace_stops_no_other_and_comes_back() -> None:
    scene = Scene("a", "b")
    scene.api.forbidden = {"b"}
    scene.submit("pong", namespace="a", uid="j")
    scene.submit("lost", namespace="b", uid="k")

    def of_the_lost() -> set[str]:
        return {kind for kind, name in scene.api.stored if name.startswith("lost-")}

    async with scene.working():
        await scene.until(lambda: scene.status.get("phase") == "Running")
        assert (list(scene.controller.lost), of_the_lost()) == (["b"], set())
        lists = scene.api.lists
        await scene.until(lambda: scene.api.lists >= lists + 4)
        assert of_the_lost() == set(), "nothing is decided about jobs whose pods cannot be seen"
        scene.api.forbidden = set()
        await scene.until(lambda: "Pod" in of_the_lost())
        assert scene.controller.lost == {}


async def test_workloads_are_listed_and_watched_where_a_job_has_a_queue() -> None:
    scene = Scene()
    scene.edit()
    await scene.controller.resync()
    assert (scene.api.pages["Workload"], scene.controller.has_workloads.is_set()) == (0, False)
    job = scene.submit("queued", namespace="a", uid="q")
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    scene.controller.notice(scene.api.keep({**job, "metadata": {**job["metadata"], "labels": labels}}))
    await scene.controller.resync()
    assert scene.api.pages["Workload"] == 1
    async with scene.working():
        await scene.until(scene.controller.has_workloads.is_set)
        assert [kind for kind, _ in scene.api.stored if kind == "Workload"] == ["Workload"]


async def test_pod_groups_are_made_once_the_api_server_serves_them(scene: Scene) -> None:
    def made() -> list[str]:
        return [name for kind, name in scene.api.stored if kind == "PodGroup"]

    assert made() == []
    scene.api.unserved.clear()
    await scene.controller.resync()
    await scene.until(lambda: len(made()) == 1)
