"""A cluster of plain values that does what plans say, and what kubelets, schedulers and people do besides.

After every order it checks what must never be: two live pods in one slot, two live heads, frames that go back within an
epoch, settled frames that ever do, a job that is over and comes back.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from cormorant_contract.parsing import parse_job
from cormorant_contract.status import CollectorJobStatus
from cormorant_operator.cache import JobRecord, Member
from cormorant_operator.decide import plan as orders
from cormorant_operator.decide.reconcile import reconcile
from cormorant_operator.defaults import OperatorDefaults
from cormorant_operator.job import Job, find
from cormorant_operator.job_state import HeadAnswer, JobState, RefusalKind, Verdict
from cormorant_operator.pods import (
    NodeFact,
    Obstacle,
    Pod,
    PodIndex,
    pod_identity,
    read_pod,
    read_termination_message,
    write_time,
)
from cormorant_operator.render.children import digest_of
from cormorant_operator.templates import Templates
from cormorant_testing.kueue import Kueue
from manifest_making import collector_job

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
GRACE_S = 60
MARKS = {
    "cormorant.dev/retiring-since": "retiring_since",
    "cormorant.dev/draining-since": "draining_since",
    "cormorant.dev/stalled-since": "stalled_since",
}


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


def make_job(*, generation: int = 1, status: CollectorJobStatus | None = None, queue: str = "", **spec: Any) -> Job:
    document = collector_job("pong", make_spec(**spec), namespace="team-a")
    return Job(
        name="pong",
        namespace="team-a",
        uid="0f3c9a52-uid",
        generation=generation,
        queue=queue,
        templates=Templates(parse_job(document).spec),
        status=status or CollectorJobStatus(),
    )


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
        self.job = make_job(queue=queue, **spec)
        self.kueue = Kueue()
        self.now = BEGIN
        self.pods: dict[str, Pod] = {}
        self.children: dict[tuple[str, str], str] = {}
        self.known = JobState(led_since=BEGIN)
        """What the operator has in memory."""
        self.lost_nodes: set[str] = set()
        self.is_deleted = False
        self.done: list[orders.Action] = []
        self.told: list[str] = []
        """Reasons of the events that were sent."""
        self.bad_image = ""
        """The API server refuses pods of this image."""
        self.quota: int | None = None
        """Pods that the namespace may have."""
        self.attempts: dict[tuple[str, int], int] = {}
        self.epoch = 0
        """Highest attempts and epoch that the operator has seen."""
        self._uids = 0
        self.then = _Then(self)

    # -- the operator ------------------------------------------------------------------------------------------

    def record(self) -> JobRecord:
        """The job's objects, as an operator's cache has them."""
        members = {
            f"{kind}/{name}": Member(version=1, fact=digest, name=name, kind=kind)
            for (kind, name), digest in self.children.items()
        }
        return JobRecord(
            namespace=self.job.namespace,
            members=members,
            pod_index=PodIndex(self.pods.values()),
            attempts=dict(self.attempts),
            epoch=self.epoch,
            workload=self.kueue.workload,
        )

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
            waiting = [pod.name for pod in self.pods.values() if pod.is_live and not pod.is_ready]
            if not waiting:
                return
            for name in waiting:
                self.start(name)
        raise AssertionError("pods never became ready")

    def wait(self, seconds: float) -> None:
        self.then.tick(seconds)

    def apply(self, **spec: Any) -> None:
        self.then.edit(**spec)

    def restart_operator(self) -> None:
        self.known = JobState(led_since=self.now)
        self.attempts, self.epoch = {}, 0
        for pod in self.pods.values():
            self._notice(pod)

    def edit(self, **spec: Any) -> None:
        self.spec = {**self.spec, **spec}
        generation = self.job.generation + 1
        self.job = make_job(generation=generation, status=self.job.status, queue=self.queue, **self.spec)

    def enqueue(self, queue: str) -> None:
        self.queue = queue
        self.job = replace(self.job, queue=queue)

    def do(self, action: orders.Action) -> None:
        self.done.append(action)
        known = self.known
        match action:
            case orders.CheckTemplate():
                image = action.manifest["spec"]["containers"][0]["image"]
                error = f"image {image} is not allowed here" if image == self.bad_image else ""
                known.verdicts[action.template] = Verdict(error=error, at=self.now, generation=self.job.generation)
            case orders.ApplyChild() if action.manifest["kind"] == "Workload":
                self.kueue.apply(action, self.now)
            case orders.ApplyChild():
                key = (action.manifest["kind"], action.manifest["metadata"]["name"])
                self.children[key] = digest_of(action.manifest)
            case orders.CreateTokens():
                known.has_tokens = True
                if action.claim is not None:
                    key = (action.claim["kind"], action.claim["metadata"]["name"])
                    self.children[key] = digest_of(action.claim)
            case orders.CreatePod():
                self._create(action)
            case orders.DeletePod():
                self.delete(action.pod.name, uid=action.pod.uid)
            case orders.MarkPod():
                if action.pod.name in self.pods:
                    self._change(action.pod.name, **{MARKS[action.annotation]: action.at})
            case orders.PatchWorkload():
                self.kueue.patch(action)
            case orders.ReadQueueObject():
                self.kueue.read(action, known, self.now)
            case orders.DeleteChild() if action.kind == "Workload":
                self.kueue.raw = None
            case orders.DeleteChild():
                self.children.pop((action.kind, action.name), None)
            case orders.SetDesired():
                if known.answer is not None and not known.is_silent:
                    known.answer = replace(
                        known.answer,
                        sizes=action.desired.groups,
                        empty_slots=action.desired.empty_slots,
                        is_spec_paused=bool(action.desired.paused),
                        pause_state="paused" if action.desired.paused else "running",
                    )
            case orders.DrainHead():
                if known.answer is not None and not known.is_silent:
                    known.answer = replace(known.answer, phase="Draining")
            case orders.CheckNode():
                known.nodes[action.name] = NodeFact(is_lost=action.name in self.lost_nodes, at=self.now)
            case orders.DeleteJob():
                self.is_deleted = True
                self.pods.clear()
        self.check()

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
        slots = Counter((pod.group, pod.index) for pod in self.pods.values() if pod.role == "worker" and pod.is_live)
        assert max(slots.values(), default=0) <= 1, f"two live pods in a slot: {slots}"
        heads = [pod.name for pod in self.pods.values() if pod.role == "head" and pod.is_live]
        assert len(heads) <= 1, f"two live heads: {heads}"

    def _create(self, action: orders.CreatePod) -> None:
        name = action.manifest["metadata"]["name"]
        if name in self.pods or self._is_past(action):
            return
        refusal = self.known.refusals.get(action.owner)
        if refusal is not None and refusal.at == self.now:
            return  # as the executor: what was refused a moment ago is refused again
        if self.quota is not None and len(self.pods) >= self.quota:
            self.known.refuse(action.owner, RefusalKind.QUOTA, "exceeded quota: pods", at=self.now)
            return
        self.known.refusals.pop(action.owner, None)
        found = self.kueue.workload
        assert not self.queue or (found is not None and found.is_admitted), f"{name} before Kueue admitted the job"
        self._uids += 1
        metadata = {**action.manifest["metadata"], "uid": f"u{self._uids}", "creationTimestamp": write_time(self.now)}
        pod = read_pod({**action.manifest, "metadata": metadata})
        assert pod is not None
        self.pods[name] = pod
        self._notice(pod)

    def _is_past(self, action: orders.CreatePod) -> bool:
        """As the executor, which looks once more: a pod's place was filled since the plan was made."""
        role, slot, number = pod_identity(action.manifest)
        return number <= (self.epoch if role == "head" else self.attempts.get(slot, -1))

    def _notice(self, pod: Pod) -> None:
        slot = (pod.group, pod.index)
        if pod.role == "head":
            self.epoch = max(self.epoch, pod.epoch)
        elif pod.role == "worker":
            self.attempts[slot] = max(self.attempts.get(slot, -1), pod.attempt)

    # -- the cluster -------------------------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        """Time passes; what was told to end has ended by its deadline."""
        self.now += timedelta(seconds=seconds)
        for pod in list(self.pods.values()):
            is_lost = pod.node in self.lost_nodes
            if pod.deletion_deadline is not None and not is_lost and self.now >= pod.deletion_deadline:
                del self.pods[pod.name]

    def place(self, name: str) -> None:
        """A node is found."""
        self._change(name, is_scheduled=True, scheduled_since=self.now, obstacle=Obstacle.NONE, obstacle_message="")

    def place_all(self) -> None:
        for pod in list(self.pods.values()):
            if pod.is_live and not pod.is_scheduled:
                self.place(pod.name)

    def start(self, name: str) -> None:
        """A node is found, the image is there, the probes answer."""
        pod = self._change(
            name,
            phase="Running",
            is_scheduled=True,
            scheduled_since=self.pods[name].scheduled_since or self.now,
            ready_since=self.now,
            obstacle=Obstacle.NONE,
            obstacle_message="",
            ip="10.0.0.1",
        )
        if pod.role == "head":
            self.say(pod)

    def unready(self, name: str) -> None:
        """Its readiness probe fails; the container runs on."""
        self._change(name, ready_since=None)

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
        message: str = "",
        **more: Any,
    ) -> None:
        """The container ends by itself."""
        frames, words = read_termination_message(message)
        self._change(
            name,
            message=words,
            settled_frames=frames,
            phase="Succeeded" if exit_code == 0 else "Failed",
            exit_code=exit_code,
            reason="Completed" if exit_code == 0 else reason,
            ended=self.now,
            ran_s=ran_s,
            ready_since=None,
            **more,
        )

    def reject(self, name: str) -> None:
        """The kubelet does not take it: none of its containers runs."""
        failed = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
        self._change(name, is_rejected=True, is_disrupted=True, is_scheduled=True, **failed)

    def evict(self, name: str) -> None:
        self.finish(name, exit_code=137, reason="Evicted", is_disrupted=True)

    def delete(self, name: str, *, uid: str = "") -> None:
        """Somebody deletes a pod; it is gone at once where nothing runs."""
        pod = self.pods.get(name)
        if pod is None or (uid and pod.uid != uid) or pod.is_terminating:
            return
        if (pod.is_terminal and not pod.has_sidecar) or not pod.is_scheduled:
            del self.pods[name]
        else:
            self._change(name, deletion_deadline=self.now + timedelta(seconds=GRACE_S), ready_since=None)

    def vanish(self, name: str) -> None:
        """Deleted by force: not even a record remains."""
        del self.pods[name]

    def lose(self, name: str) -> None:
        """Its node is gone, and the deletion that follows is never confirmed."""
        self.expel(name)
        self.lost_nodes.add(self.pods[name].node)

    def expel(self, name: str) -> None:
        """A taint deletes it, with its grace."""
        until = self.now + timedelta(seconds=GRACE_S)
        node = f"node-of-{name}"
        self._change(
            name, deletion_deadline=until, node=node, is_taint_evicted=True, is_disrupted=True, ready_since=None
        )

    def block(self, name: str, obstacle: Obstacle, message: str) -> None:
        """It cannot start; what has an image to pull has a node."""
        if obstacle is Obstacle.UNSCHEDULABLE:
            self._change(name, is_scheduled=False, scheduled_since=None)
        elif not self.pods[name].is_scheduled:
            self.place(name)
        self._change(name, obstacle=obstacle, obstacle_message=message)

    def _change(self, name: str, **changes: Any) -> Pod:
        self.pods[name] = replace(self.pods[name], **changes)
        self.check()
        return self.pods[name]

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
