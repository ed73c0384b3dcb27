"""A job at one moment, as all parts of `reconcile` see it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from math import ceil
from operator import attrgetter

from cormorant_contract.spec import RunPolicy
from cormorant_contract.workers import Autoscale, WorkerGroup
from cormorant_operator.cache import JobRecord, WorkerBuild
from cormorant_operator.job import Job
from cormorant_operator.job_state import WAITS_LAST_S, HeadAnswer, JobState, RefusalKind, Verdict, Waits
from cormorant_operator.names import Manifest
from cormorant_operator.pods import Pod, Slot, failures_after, next_attempt_at
from cormorant_operator.render.children import pod_groups
from cormorant_operator.settings import OperatorDefaults
from cormorant_operator.workload import NO_PLACEMENT, Placement

VERDICT_LASTS_S = 600.0
"""A template that the API server refused is verified again after this time, even if unchanged."""
_LEAVING_S = 1.0
"""Retry interval for a name that Kubernetes is about to free."""
_UP_AFTER_S = 30.0
_WAITS, _IDLE, _RARELY, _BUSY = 0.2, 0.25, 0.05, 0.9
_AT_MOST = 0.5
"""Cap on the waiting share: an autoscaled group at most doubles in one step."""


@dataclass(frozen=True)
class View:
    job: Job
    record: JobRecord
    """Objects of the job in the cluster."""
    state: JobState
    """Answers of its head and the API server."""
    now: datetime
    defaults: OperatorDefaults

    @property
    def policy(self) -> RunPolicy:
        return self.job.spec.run_policy

    # -- the head ----------------------------------------------------------------------------------------------

    @cached_property
    def heads(self) -> tuple[Pod, ...]:
        """Head pods, the newest last."""
        return self.record.heads

    @property
    def canaries(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.record.pod_index.others.values() if pod.role == "canary")

    @property
    def newest_head(self) -> Pod | None:
        return self.heads[-1] if self.heads else None

    @cached_property
    def live_head(self) -> Pod | None:
        """The newest head, if it is live."""
        return self.record.live_head

    @property
    def epoch(self) -> int:
        newest = self.newest_head
        return max(self.job.status.epoch, self.record.epoch, newest.epoch if newest is not None else 0)

    @property
    def head_failures(self) -> int:
        newest = self.newest_head
        # A head that the status knows but that is gone was deleted, which is not a failure.
        if newest is None or newest.epoch < self.job.status.epoch:
            return self.job.status.head_restarts
        return failures_after(newest)

    @property
    def answer(self) -> HeadAnswer | None:
        """Last answer of the live head; None while it is silent."""
        answer, head = self.state.answer, self.live_head
        if answer is None or head is None or answer.pod_uid != head.uid or self.state.is_silent:
            return None
        return answer

    @property
    def heard(self) -> tuple[datetime, datetime] | None:
        """Since when, and when last, the live head has answered without a gap; None while it is silent, which stops
        deadlines.
        """
        since, last = self.state.answering_since, self.state.answered_at
        return (
            (since, min(last, self.now)) if self.answer is not None and since is not None and last is not None else None
        )

    @property
    def base_image(self) -> str:
        """Image of this epoch: the live head's; without one, the next head's."""
        live = self.live_head
        return live.base_image if live is not None else self.job.spec.image or self.defaults.image

    @property
    def cuda_image(self) -> str:
        """Image of this epoch's workers with a device; empty: the base image. A head keeps the pair it came with."""
        live = self.live_head
        return live.cuda_image if live is not None else self.next_cuda_image

    @property
    def next_cuda_image(self) -> str:
        return "" if self.job.spec.image else self.defaults.cuda_image

    # -- the queue ---------------------------------------------------------------------------------------------

    @cached_property
    def may_create(self) -> bool:
        """Whether pods may be created: Kueue admitted a job with a queue, for its current resources."""
        if not self.job.queue:
            return True
        workload = self.record.workload
        return workload is not None and workload.is_admitted and not self.unread_flavors and not self.is_reshaped

    @property
    def is_reshaped(self) -> bool:
        """Whether the held quota is for other resources than the job's pods would request now."""
        workload = self.record.workload
        return (
            workload is not None
            and workload.is_reserved
            and workload.request.partition(".")[0] != self.job.templates.quota
        )

    @property
    def unread_flavors(self) -> tuple[str, ...]:
        workload = self.record.workload
        if workload is None:
            return ()
        return tuple(name for name in sorted(workload.flavors) if (name, workload.admission) not in self.state.flavors)

    def placement(self, pod_set: str) -> Placement:
        """Fields that Kueue adds to pods of the head, or of a group."""
        held = self.record.workload
        found = held.pod_sets.get(pod_set) if held is not None and self.may_create else None
        # Flavors are no longer read for a job without a queue.
        if held is None or found is None or self.unread_flavors:
            return NO_PLACEMENT
        return sum((self.state.flavors[name, held.admission] for name in found.flavors), NO_PLACEMENT) + found.update

    @cached_property
    def eviction(self) -> str:
        """Why Kueue evicts the job; empty: it does not."""
        workload, head = self.record.workload, self.newest_head
        if not self.job.queue or workload is None or not self.has_pods:
            return ""
        if workload.holds("Evicted"):
            return workload.words_of("Evicted")
        # A Workload younger than the pods replaces a deleted one and was not admitted yet; a new one says nothing yet.
        is_withdrawn = workload.condition("Admitted").get("status") == "False"
        return workload.words_of("Admitted") if is_withdrawn and head and workload.created <= head.created else ""

    @property
    def is_stopping(self) -> bool:
        """Whether the user or Kueue wants the pods deleted."""
        return self.job.spec.suspend or bool(self.eviction)

    # -- the gang ----------------------------------------------------------------------------------------------

    @cached_property
    def is_gang_forming(self) -> bool:
        """Whether the next pods are a gang: no pod holds a node, and no head or slot waits for its next attempt."""
        pods = self.record.pod_index.pods.values()
        if any(pod.is_scheduled and not pod.is_terminal and not self.is_lost(pod) for pod in pods):
            return False
        head = self.newest_head
        waits = [next_attempt_at(head)] if head is not None and head.must_wait else []
        for group in self.groups:
            template = self.job.templates.worker(group)
            empty = (slot for slot in self.wanted_slots(group.name) if slot.live is None)
            waits += (slot.waits_until(template) or self.now for slot in empty)
        return all(until <= self.now for until in waits)

    @cached_property
    def pod_groups(self) -> list[Manifest]:
        """The PodGroup of a job that gets one. Once a pod holds a node, the rest of the gang need not wait."""
        if not self.defaults.has_pod_groups:
            return []
        return pod_groups(self.job, workers=sum(self.fewest.values()) if self.is_gang_forming else 0)

    @property
    def gang(self) -> str:
        """Name of the PodGroup of new pods; empty: none. Others, such as replacements, wait for no other pod."""
        names = (group["metadata"]["name"] for group in self.pod_groups if self.is_gang_forming)
        return next((name for name in names if ("PodGroup", name) in self.children), "")

    # -- workers -----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        return self.job.spec.worker_groups

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Workers that each group should have."""
        workload, sizes = self.record.workload, {}
        for group in self.groups:
            size = self.wanted_size_of(group)
            if self.job.queue and workload is not None and workload.is_admitted:
                size = min(size, workload.pod_sets[group.name].held if group.name in workload.pod_sets else 0)
            elif self.job.queue and self.has_pods:
                # Without an admission, existing pods stay and no more are created.
                size = min(size, self._size_before(group, size))
            sizes[group.name] = size
        return sizes

    def _size_before(self, group: WorkerGroup, default: int) -> int:
        return next((known.desired for known in self.job.status.groups if known.name == group.name), default)

    def wanted_size_of(self, group: WorkerGroup) -> int:
        """Workers that a group should have, whatever Kueue admits."""
        size = self.job.spec.size_of(group)
        if group.autoscale is None:
            return size
        # The status keeps the last autoscaled size, also for the next operator.
        before = self._size_before(group, size)
        waits: Sequence[tuple[datetime, Waits]] = self.state.waits if self.answer is not None else ()
        return autoscaled(group.autoscale, before, waits, group=group.name)

    @cached_property
    def fewest(self) -> Mapping[str, int]:
        """Workers that each group needs to start with."""
        return {group.name: min(self.sizes[group.name], max(1, group.min_replicas or 1)) for group in self.groups}

    @cached_property
    def children(self) -> Mapping[tuple[str, str], str]:
        """Digests of the job's other objects, by (kind, name)."""
        return self.record.children

    @cached_property
    def counted(self) -> Mapping[str, Sequence[WorkerBuild]]:
        """Builds whose healthy workers all lie within the size of their group, by group.

        All are live, scheduled and ready: their slots need nothing except rolling updates.
        """
        builds: dict[str, list[WorkerBuild]] = {group.name: [] for group in self.groups}
        for build, pods in self.record.pod_index.healthy.items():
            is_own = build.group in builds and build.base_image == self.base_image
            if is_own and max(pods) < self.sizes[build.group]:
                builds[build.group].append(build)
        return builds

    @cached_property
    def examined(self) -> tuple[Pod, ...]:
        """All other pods: heads, canaries, and workers that need individual attention."""
        counted = {build for builds in self.counted.values() for build in builds}
        others = [*self.record.pod_index.others.values()]
        for build, pods in self.record.pod_index.healthy.items():
            others += pods.values() if build not in counted else ()
        key = attrgetter("role", "group", "index", "attempt", "created", "name")
        return tuple(sorted(others, key=key))

    @cached_property
    def examined_workers(self) -> Mapping[str, Sequence[Pod]]:
        """Examined workers by group, including groups that were removed from the spec."""
        by_group: dict[str, list[Pod]] = {group.name: [] for group in self.groups}
        for pod in self.examined:
            if pod.role == "worker":
                by_group.setdefault(pod.group, []).append(pod)
        return by_group

    @cached_property
    def slots(self) -> Mapping[str, tuple[Slot, ...]]:
        """Slots by group, except those of counted workers."""
        attempts, slots = self.record.attempts, {}
        for group, size in self.sizes.items():
            by_index: dict[int, list[Pod]] = {}
            for pod in self.examined_workers[group]:
                by_index.setdefault(pod.index, []).append(pod)
            if self.num_counted(group) + sum(index < size for index in by_index) < size:
                counted = (self.record.pod_index.healthy[build].keys() for build in self.counted[group])
                by_index |= {index: [] for index in set(range(size)).difference(by_index, *counted)}
            slots[group] = tuple(
                Slot(index=index, pods=tuple(pods), last_attempt=attempts.get((group, index), -1))
                for index, pods in sorted(by_index.items())
            )
        return slots

    def wanted_slots(self, group: str) -> list[Slot]:
        """Slots of a group within its size."""
        return [slot for slot in self.slots[group] if slot.index < self.sizes[group]]

    def num_counted(self, group: str) -> int:
        return sum(len(self.record.pod_index.healthy[build]) for build in self.counted[group])

    def restarts(self, group: str) -> int:
        """All failures of the slots of a group, from their existing pods."""
        counted = sum(self.record.pod_index.restarts[build] for build in self.counted[group])
        return counted + sum(slot.restarts for slot in self.slots[group])

    def ready(self, group: str) -> int:
        return self.num_counted(group) + sum(pod.is_ready for pod in self.examined_workers[group])

    @cached_property
    def has_enough(self) -> bool:
        """Whether the head and enough workers of each group are ready to collect."""
        head = self.live_head
        return (
            head is not None
            and head.is_ready
            and all(self.ready(name) >= fewest for name, fewest in self.fewest.items())
        )

    # -- answers of the API server ------------------------------------------------------------------------------

    @property
    def all_templates(self) -> tuple[str, ...]:
        return self.job.templates.head, *(self.job.templates.worker(group) for group in self.groups)

    def is_proven(self, template: str) -> bool:
        """Whether the API server is known to accept pods of a template: from a dry run, or because one exists."""
        verdict = self.verdict(template)
        if verdict is not None:
            return verdict.error == ""
        is_healthy = any(build.template == template for build in self.record.pod_index.healthy)
        return is_healthy or any(pod.template == template for pod in self.record.pod_index.others.values())

    def is_refused(self, template: str) -> bool:
        verdict = self.verdict(template)
        return verdict is not None and bool(verdict.error)

    def verdict(self, template: str) -> Verdict | None:
        """Result of the dry run of a template, unless it has expired."""
        verdict = self.state.verdicts.get(template)
        if verdict is None or not verdict.error:
            return verdict
        is_old = verdict.generation != self.job.generation or self.now >= self.after(verdict.at, VERDICT_LASTS_S)
        return None if is_old else verdict

    def refused_until(self, owner: str) -> datetime | None:
        """When a refused request may be repeated; None: now."""
        refusal = self.state.refusals.get(owner)
        if refusal is None:
            return None
        once_s = min(60.0, 5.0 * 2.0 ** min(refusal.count - 1, 16))  # 5, 10, 20, 40, 60, 60 ...
        until = self.after(refusal.at, _LEAVING_S if refusal.kind is RefusalKind.LEAVING else once_s)
        return until if until > self.now else None

    def retries(self) -> Iterator[datetime]:
        """When refused requests may be repeated."""
        for owner in self.state.refusals:
            if (until := self.refused_until(owner)) is not None:
                yield until
        for template in self.state.verdicts:
            if (verdict := self.verdict(template)) is not None and verdict.error:
                yield self.after(verdict.at, VERDICT_LASTS_S)

    # -- time --------------------------------------------------------------------------------------------------

    def after(self, moment: datetime, seconds: float) -> datetime:
        return moment + timedelta(seconds=seconds)

    def drained_by(self, since: datetime) -> datetime:
        """When the drain time ends that was marked at `since`. The operator that marked it may have ended before it
        sent the command.
        """
        return self.after(max(since, self.state.led_since), self.policy.drain_seconds)

    @property
    def has_pods(self) -> bool:
        """Whether a pod exists on a reachable node; one on a lost node may stay listed forever."""
        return any(not self.is_lost(pod) for pod in self.record.pods)

    def is_lost(self, pod: Pod) -> bool:
        """Whether a pod's node is known to be lost, so that its end is never confirmed."""
        node = self.state.nodes.get(pod.node)
        # A node that was lost before the pod was created has returned since.
        is_node_lost = node is not None and node.is_lost and node.at >= pod.created
        return pod.phase == "Unknown" or (pod.is_taint_evicted and is_node_lost)


def autoscaled(scale: Autoscale, size: int, waits: Sequence[tuple[datetime, Waits]], *, group: str) -> int:
    """The next size of a group with `size` workers, by whether workers or learners wait.

        learners wait, workers are busy    more workers: as many as would have kept the learners busy
        workers are idle, no learner waits fewer: as many as would have been busy nine tenths of the time
        both, or neither                   the size is right, or not what limits (on-policy learners wait and let wait)

    `waits` is evidence if the size did not change and every worker was ready (`JobState.waits`). Between the thresholds
    nothing changes, and a step down never reaches a size at which learners would wait again, so it settles.
    """
    wanted, is_measured = size, bool(waits) and waits[-1][1].sizes.get(group) == size
    for period_s in (_UP_AFTER_S, WAITS_LAST_S) if is_measured else ():
        until, last = waits[-1]
        began = next((pair for pair in reversed(waits) if (until - pair[0]).total_seconds() >= period_s), None)
        if began is None:
            break
        since, first = began
        worker_s = last.worker_s.get(group, 0.0) - first.worker_s.get(group, 0.0)
        idle_s = last.idle_s.get(group, 0.0) - first.idle_s.get(group, 0.0)
        idle = min(1.0, max(0.0, idle_s / worker_s)) if worker_s > 0 else 0.0
        consumer = min(1.0, max(0.0, (last.consumer_s - first.consumer_s) / (until - since).total_seconds()))
        if consumer > _WAITS and idle < _RARELY:
            wanted = ceil(size / (1 - min(consumer, _AT_MOST)))
            break
        if period_s == WAITS_LAST_S and idle > _IDLE and consumer < _RARELY:
            wanted = min(size, ceil(size * (1 - idle) / _BUSY))
    return min(max(wanted, scale.min_replicas), scale.max_replicas)
