"""One job in a small cluster: the operator's decisions, executor and cache at an API server in memory, and all that
kubelets, schedulers and people do besides, under a clock of the tests.

After every order it checks what must never be: two live pods in one slot, two live heads, frames that go back within an
epoch, settled frames that ever do, a job that is over and comes back.
"""

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from cormorant_contract.children import QUEUE
from cormorant_contract.job import KIND
from cormorant_contract.rest.control import Desired
from cormorant_operator import names
from cormorant_operator.cache import Cache, JobRecord
from cormorant_operator.decide import plan as orders
from cormorant_operator.decide.reconcile import reconcile
from cormorant_operator.errors import HeadSilent, KubeConflict, KubeRefused
from cormorant_operator.executor import Executor
from cormorant_operator.job import Job, find, read_job
from cormorant_operator.job_state import HeadAnswer, JobState
from cormorant_operator.names import Manifest
from cormorant_operator.pods import Obstacle, Pod, write_time
from cormorant_operator.settings import OperatorDefaults
from cormorant_operator.workload import Workload, read_workload
from cormorant_testing.api_server import ApiServer, Raw
from manifest_making import collector_job

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
GRACE_S = 60
UID = "0f3c9a52-uid"
_CONDITIONS = ("PodScheduled", "Ready", "DisruptionTarget")


def make_spec(**changes: Any) -> dict[str, Any]:
    """A small valid spec; keywords replace its top-level keys."""
    return {
        "env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": 8}},
        "policy": {"random": {}},
        "collection": {"framesPerBatch": 64, "totalFrames": 100_000},
        "image": "example/cormorant:1",
        "replicas": 2,
        **changes,
    }


def make_document(*, generation: int = 1, queue: str = "", **spec: Any) -> Raw:
    metadata = {"namespace": "team-a", "uid": UID, "generation": generation, "labels": {QUEUE: queue}}
    return collector_job("pong", make_spec(**spec), **metadata)


def make_job(**fields: Any) -> Job:
    """`fields`: those of `make_document`."""
    job = read_job(make_document(**fields))
    assert isinstance(job, Job), job
    return job


class _Server(ApiServer):
    """Refuses pods, and gives those that run their grace."""

    def __init__(self, world: "World") -> None:
        super().__init__(now=lambda: write_time(world.now))
        self._world = world

    async def create(self, manifest: Manifest, *, is_dry_run: bool = False) -> Raw:
        if manifest["kind"] == "Pod":
            self._world.admit(manifest, is_dry_run=is_dry_run)
        return await super().create(manifest, is_dry_run=is_dry_run)

    def remove(self, kind: str, name: str) -> Raw:
        pod = self._world.pods.get(name) if kind == "Pod" else None
        if pod is None or (pod.is_terminal and not pod.has_sidecar) or not pod.is_scheduled:
            return super().remove(kind, name)
        if pod.is_terminating:
            return self.stored[kind, name]
        self._world.change(name, deletionTimestamp=write_time(self._world.now + timedelta(seconds=GRACE_S)))
        return self._world.say_of(name, Ready="False")


class _Then:
    """`world.then.evict(name)`: it happens, and the operator has done what it wants."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def __getattr__(self, name: str) -> Callable[..., None]:
        def happen(*given: Any, **named: Any) -> None:
            getattr(self._world, name)(*given, **named)
            self._world.settle()

        return happen


class World:
    def __init__(self, *, defaults: OperatorDefaults | None = None, queue: str = "", **spec: Any) -> None:
        self.defaults = defaults or OperatorDefaults()
        self.spec, self.queue = spec, queue
        self.now = BEGIN
        self.api = _Server(self)
        self.kueue = Kueue(self.api, self.keep)
        self.lost_nodes: set[str] = set()
        self.done: list[orders.Action] = []
        self.told: list[str] = []
        """Reasons of the events that were sent."""
        self.bad_image = ""
        """The API server refuses pods of this image."""
        self.quota: int | None = None
        """Pods that the namespace may have."""
        self.then = _Then(self)
        self.api.keep(make_document(queue=queue, **spec))
        self.restart_operator()
        job = self.record().job
        assert isinstance(job, Job), job
        self.job = job

    # -- the operator ------------------------------------------------------------------------------------------

    def record(self) -> JobRecord:
        """The job's objects, as the operator has seen them."""
        return self.cache.record(UID)

    @property
    def pods(self) -> dict[str, Pod]:
        return {pod.name: pod for pod in sorted(self.record().pods, key=lambda pod: (pod.created, pod.name))}

    @property
    def children(self) -> dict[tuple[str, str], str]:
        return self.record().children

    @property
    def is_deleted(self) -> bool:
        return (KIND, "pong") not in self.api.stored

    def state(self, **changes: Any) -> JobState:
        return replace(self.known, answered_at=self.now, **changes)

    def plan(self, *, now: datetime | None = None, **state: Any) -> orders.Plan:
        """What an operator wants; keywords change what it knows."""
        return reconcile(self.job, self.record(), self.state(**state), now or self.now, defaults=self.defaults)

    def step(self, *, crash_after: int | None = None) -> orders.Plan:
        """Reconcile once; `crash_after`: the operator dies after so many writes."""
        plan = self.plan()
        for action in plan.actions[:crash_after]:
            self.do(action)
        if crash_after is None or crash_after > len(plan.actions):
            self.write(plan)
        return plan

    def settle(self) -> None:
        """Reconcile until nothing is wanted any more."""
        for _ in range(40):
            if self.is_deleted or not changes(self.step()):
                return
        raise AssertionError(f"not settled after 40 reconciles: {self.plan()}")

    def run(self) -> None:
        """Reconcile and let every pod that can start become ready, until nothing changes."""
        for _ in range(40):
            self.settle()
            if all(pod.is_ready for pod in self.pods.values() if pod.is_live):
                return
            self.start_all()
        raise AssertionError("pods never became ready")

    def wait(self, seconds: float) -> None:
        self.then.tick(seconds)

    def apply(self, **spec: Any) -> None:
        self.then.edit(**spec)

    def restart_operator(self) -> None:
        self.known = JobState(led_since=self.now)
        """What the operator has in memory."""
        self.cache = Cache()
        given: Any = (self.api, self)
        self.executor = Executor(*given, self.cache, key=b"k" * 32, clock=lambda: self.now)
        for raw in self.api.stored.values():
            labels = raw["metadata"].get("labels") or {}
            if raw["kind"] == KIND or labels.get(names.MANAGED_BY) == names.MANAGER:
                self.cache.see(raw)

    def edit(self, **spec: Any) -> None:
        self.spec = {**self.spec, **spec}
        job = make_job(generation=self.job.generation + 1, queue=self.queue, **self.spec)
        self.job = replace(job, status=self.job.status)

    def enqueue(self, queue: str) -> None:
        self.queue = queue
        self.job = replace(self.job, queue=queue)

    def do(self, action: orders.Action) -> None:
        self.done.append(action)
        with suppress(KubeConflict):
            _run(self.executor.do(self.job, action, self.known, decided_at=self.now))
        if self.is_deleted:
            for kind, name in list(self.api.stored):
                self.vanish(name, kind)
        self.check()

    async def set_desired(self, _job: Job, _head: Pod, desired: Desired) -> None:
        self._tell_head(
            sizes=desired.groups,
            empty_slots=desired.empty_slots,
            is_spec_paused=bool(desired.paused),
            pause_state="paused" if desired.paused else "running",
        )

    async def drain(self, _job: Job, _head: Pod) -> None:
        self._tell_head(phase="Draining")

    def _tell_head(self, **changes: Any) -> None:
        if self.known.answer is None or self.known.is_silent:
            raise HeadSilent("it does not answer")
        self.known.answer = replace(self.known.answer, **changes)

    def write(self, plan: orders.Plan) -> None:
        self.told += [note.reason for note in plan.events]
        if plan.status is None:
            return
        before = self.job.status
        assert plan.status.epoch >= before.epoch
        assert plan.status.frames.settled >= before.frames.settled
        assert plan.status.frames.collected >= plan.status.frames.settled
        assert plan.status.frames.collected >= before.frames.collected or plan.status.epoch > before.epoch
        for kind in ("Completed", "Failed"):
            assert find(before, kind) is None or find(plan.status, kind) == find(before, kind)
        self.job = replace(self.job, status=plan.status)

    def check(self) -> None:
        live = [pod for pod in self.record().pod_index.pods.values() if pod.is_live]
        places = Counter((pod.role, pod.group, pod.index) for pod in live if pod.role != "canary")
        assert max(places.values(), default=0) <= 1, f"two live pods in one place: {places}"

    def admit(self, pod: Manifest, *, is_dry_run: bool) -> None:
        """What admission plugins say of a new pod."""
        image = pod["spec"]["containers"][0]["image"]
        words = f"image {image} is not allowed here" if image == self.bad_image else ""
        if not is_dry_run:
            found = self.kueue.workload
            assert not self.queue or (found is not None and found.is_admitted), "a pod before Kueue admitted the job"
            words = "exceeded quota: pods" if self.quota is not None and len(self.pods) >= self.quota else words
        if words:
            raise KubeRefused(403 if "quota" in words else 422, {"message": words}, request="POST pods")

    # -- the cluster -------------------------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        """Time passes; what was told to end has ended by its deadline."""
        self.now += timedelta(seconds=seconds)
        for pod in list(self.pods.values()):
            is_lost = pod.node in self.lost_nodes
            if pod.deletion_deadline is not None and not is_lost and self.now >= pod.deletion_deadline:
                self.vanish(pod.name)

    def place(self, name: str) -> None:
        """A node is found."""
        self.say_of(name, PodScheduled="True", containerStatuses=[])

    def place_all(self) -> None:
        for pod in list(self.pods.values()):
            if pod.is_live and not pod.is_scheduled:
                self.place(pod.name)

    def start(self, name: str) -> None:
        """A node is found, the image is there, the probes answer."""
        self.place(name)
        self.say_of(name, Ready="True", phase="Running", podIP="10.0.0.1")
        if self.pods[name].role == "head":
            self.say(self.pods[name])

    def unready(self, name: str) -> None:
        """Its readiness probe fails; the container runs on."""
        self.say_of(name, Ready="False")

    def start_all(self) -> None:
        for pod in list(self.pods.values()):
            if pod.is_live and not pod.is_ready:
                self.start(pod.name)

    def say(self, head: Pod, **changes: Any) -> None:
        """The head answers for the first time, or something new."""
        known = self.known
        if known.answer is None or known.answer.pod_uid != head.uid:
            settled = self.job.status.frames.settled
            first = HeadAnswer(
                pod_uid=head.uid,
                phase="Running",
                frames=settled,
                settled=settled,
                sizes={group.name: self.job.spec.size_of(group) for group in self.job.spec.worker_groups},
                is_spec_paused=self.job.spec.paused,
            )
            known.record_answer(first, at=self.now, max_gap_s=math.inf)
        if known.is_silent:
            known.answering_since, known.is_silent = self.now, False
        known.answer = replace(known.answer, **changes)

    def collect(self, frames: int, *, settled: int | None = None) -> None:
        """So many frames in all by now; all of them settled, if it is not said."""
        self.say(self.head, frames=frames, settled=frames if settled is None else settled, per_second=100.0)

    def finish(
        self,
        name: str,
        *,
        exit_code: int = 1,
        reason: str = "Error",
        ran_s: float = 5.0,
        message: str | None = None,
        has_sidecar: bool = False,
        **conditions: str,
    ) -> None:
        """The container ends by itself; a head that ends with 0 leaves its count."""
        began, over = write_time(self.now - timedelta(seconds=ran_s)), write_time(self.now)
        reason, phase = ("Completed", "Succeeded") if exit_code == 0 else (reason, "Failed")
        if message is None:
            message = '{"frames": 0}' if exit_code == 0 and self.pods[name].role == "head" else ""
        ended = {"exitCode": exit_code, "reason": reason, "message": message, "startedAt": began, "finishedAt": over}
        containers = [{"name": self.pods[name].role, "state": {"terminated": ended}}]
        if has_sidecar:
            containers.append({"name": "sidecar", "state": {"running": {}}})
        phase = "Running" if has_sidecar else phase
        self.say_of(name, PodScheduled="True", Ready="False", phase=phase, containerStatuses=containers, **conditions)

    def reject(self, name: str) -> None:
        """The kubelet does not take it: none of its containers runs."""
        self.say_of(name, PodScheduled="True", Ready="False", phase="Failed", reason="UnexpectedAdmissionError")

    def evict(self, name: str) -> None:
        self.finish(name, exit_code=137, reason="Evicted", DisruptionTarget="True")

    def delete(self, name: str) -> None:
        """Somebody deletes a pod; it is gone at once where nothing runs."""
        self.api.remove("Pod", name)
        if ("Pod", name) not in self.api.stored:
            self.cache.forget(self.pods[name].uid)

    def vanish(self, name: str, kind: str = "Pod") -> None:
        """Deleted by force: not even a record remains."""
        raw = self.api.stored.pop((kind, name))
        self.cache.see(raw, is_deleted=True)

    def lose(self, name: str) -> None:
        """Its node is gone, and the deletion that follows is never confirmed."""
        self.expel(name)
        self.lose_node(self.pods[name].node)

    def lose_node(self, name: str) -> None:
        del self.api.stored["Node", name]
        self.lost_nodes.add(name)

    def expel(self, name: str) -> None:
        """A taint deletes it, with its grace."""
        ready = {"type": "Ready", "status": "True"}
        node = {"kind": "Node", "metadata": {"name": f"node-of-{name}"}, "status": {"conditions": [ready]}}
        self.api.keep(node)
        self.api.stored["Pod", name]["spec"]["nodeName"] = f"node-of-{name}"
        self.change(name, deletionTimestamp=write_time(self.now + timedelta(seconds=GRACE_S)))
        self.say_of(name, Ready="False", DisruptionTarget=("True", "DeletionByTaintManager", ""))

    def block(self, name: str, obstacle: Obstacle, message: str) -> None:
        """It cannot start; what has an image to pull has a node."""
        if obstacle is Obstacle.UNSCHEDULABLE:
            self.say_of(name, PodScheduled=("False", "Unschedulable", message))
            return
        image, _, words = message.removeprefix("image ").rpartition(": ")
        is_image = obstacle is Obstacle.IMAGE_PULL
        reason = "ErrImagePull" if is_image else "CreateContainerConfigError"
        waiting = {"reason": reason, "message": words if is_image else message}
        container = {"name": self.pods[name].role, "image": image, "state": {"waiting": waiting}}
        self.say_of(name, PodScheduled="True", containerStatuses=[container])

    def say_of(self, name: str, **status: Any) -> Raw:
        """A kubelet or a controller writes parts of a pod's status; conditions by name: status, or with their reason
        and message.
        """
        raw = self.api.stored["Pod", name]
        before = raw.get("status", {})
        conditions = {found["type"]: found for found in before.get("conditions", ())}
        for kind in [key for key in status if key in _CONDITIONS]:
            value, reason, message = said if isinstance(said := status.pop(kind), tuple) else (said, "", "")
            if conditions.get(kind, {}).get("status") != value:
                conditions[kind] = {"type": kind, "status": value, "lastTransitionTime": write_time(self.now)}
            conditions[kind] |= {"reason": reason, "message": message}
        return self.keep({**raw, "status": {**before, **status, "conditions": list(conditions.values())}})

    def change(self, name: str, **metadata: Any) -> Raw:
        raw = self.api.stored["Pod", name]
        return self.keep({**raw, "metadata": {**raw["metadata"], **metadata}})

    def keep(self, raw: Raw) -> Raw:
        """An object changes, and the operator's watch tells of it."""
        kept = self.api.keep(raw)
        self.cache.see(kept)
        self.check()
        return kept

    # -- asking ------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Pod:
        return next(pod for pod in self.pods.values() if pod.role == "head" and pod.is_live)

    def live(self) -> list[Pod]:
        """Live workers, by slot."""
        found = [pod for pod in self.pods.values() if pod.role == "worker" and pod.is_live]
        return sorted(found, key=lambda pod: (pod.group, pod.index))

    def slots(self) -> list[str]:
        return [f"{pod.group}-{pod.index}" for pod in self.live()]

    def condition(self, kind: Any) -> str:
        """`True/Reason` of a condition; empty when there is none."""
        found = find(self.job.status, kind)
        return f"{found.status}/{found.reason}" if found is not None else ""

    def message(self, kind: Any) -> str:
        found = find(self.job.status, kind)
        return found.message if found is not None else ""


class Kueue:
    """Kueue as plain values: one Workload that is admitted and evicted when a test says so."""

    def __init__(self, api: ApiServer, write: Callable[[Manifest], object]) -> None:
        """`write`: changes an object, and tells the operator."""
        self._api, self._write = api, write
        self.label_nodes()

    def label_nodes(self, **labels: str) -> None:
        """Of the flavor `spot`."""
        spec = {"nodeLabels": labels}
        self._api.keep({"kind": "ResourceFlavor", "metadata": {"name": "spot"}, "spec": spec})

    @property
    def raw(self) -> Manifest | None:
        """The Workload as the API server holds it."""
        return next((raw for (kind, _), raw in self._api.stored.items() if kind == "Workload"), None)

    @property
    def workload(self) -> Workload | None:
        return read_workload(self.raw) if self.raw is not None else None

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.raw.get("status") or {})

    def condition(self, kind: str) -> str:
        """`True/Reason`; empty if there is none."""
        found = next((c for c in self.status.get("conditions", ()) if c["type"] == kind), None)
        return f"{found['status']}/{found['reason']}" if found is not None else ""

    def admit(self, at: datetime, counts: Mapping[str, int] | None = None, **status: Any) -> None:
        """Reserve quota of the flavor `spot` and admit; `counts`: pod sets that get fewer pods than asked for."""
        assignments = [
            {
                "name": item["name"],
                "count": (counts or {}).get(item["name"], item["count"]),
                "flavors": {"cpu": "spot", "memory": "spot"},
            }
            for item in self.raw["spec"]["podSets"]
        ]
        admission = {"clusterQueue": "cq", "podSetAssignments": assignments}
        news = {"QuotaReserved": ("True", "QuotaReserved"), "Admitted": ("True", "Admitted")}
        if self.condition("Evicted"):
            news["Evicted"] = ("False", "QuotaReserved")
        self._say(news, at, admission=admission, **status)

    def hold(self, message: str, at: datetime) -> None:
        self._say({"QuotaReserved": ("False", "Pending")}, at, message)

    def evict(self, at: datetime, reason: str = "Preempted") -> None:
        self._say({"Evicted": ("True", reason)}, at, f"{reason} to accommodate another workload")

    def _say(self, news: Mapping[str, tuple[str, str]], at: datetime, message: str = "", **status: Any) -> None:
        kept = [c for c in self.status.get("conditions", ()) if c["type"] not in news]
        said = [
            {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": write_time(at)}
            for kind, (value, reason) in news.items()
        ]
        status = {**self.status, "conditions": [*kept, *said], **status}
        self._write({**self.raw, "status": status})


def _run(request: Coroutine[Any, Any, None]) -> None:
    """What waits for nothing needs no event loop."""
    with suppress(StopIteration):
        request.send(None)
        raise AssertionError("a request to a server in memory waits")


def of_kind(actions: Iterable[orders.Action], kind: type[orders.Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def running(**spec: Any) -> World:
    """A job whose pods are all ready and collecting."""
    world = World(**spec)
    world.run()
    world.tick(20)
    world.collect(1000)
    world.settle()
    return world


def waiting(**spec: Any) -> World:
    """The same, but no frame came for a while: what is due next is due for another reason."""
    world = running(**spec)
    world.wait(60)
    return world


def changes(plan: orders.Plan) -> tuple[Any, ...]:
    """What a plan does: its actions, and its new status."""
    return (*plan.actions, *([] if plan.status is None else [plan.status]))
