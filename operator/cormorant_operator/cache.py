"""The operator's view of the cluster: jobs and their objects, by the job's uid. Belongs to one event loop.

Watches, lists and the answers to the operator's own writes feed it. A created object is in the cache at once, so a late
watch event cannot cause a second creation. An older version of an object never replaces a newer one.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cormorant_operator.job import Job, Unreadable, read_job
from cormorant_operator.pods import Obstacle, Pod, controller_uid, pod_identity, read_pod
from cormorant_operator.render.children import digest_of
from cormorant_operator.workload import Workload, read_workload

_MAX_TOMBSTONES = 20_000
_READERS: Mapping[str, Callable[[Mapping[str, Any]], Pod | Workload | str | None]] = {
    "Pod": read_pod,
    "Workload": read_workload,
}
"""Parser of each kind of object; other kinds are kept as a digest."""


@dataclass(slots=True)
class Member:
    version: int
    fact: Pod | Workload | str
    name: str
    kind: str


class WorkerBuild(NamedTuple):
    group: str
    template: str
    base_image: str


class PodIndex:
    """The pods of one job. Changed by the cache only, between two reconciles."""

    def __init__(self, pods: Iterable[Pod] = ()) -> None:
        self.pods: dict[str, Pod] = {}
        """Every pod by uid."""
        self.others: dict[str, Pod] = {}
        """Heads, canaries, and workers that are not healthy, by uid."""
        self.healthy: dict[WorkerBuild, dict[int, Pod]] = {}
        """Healthy workers by build, and by index."""
        self.restarts: Counter[WorkerBuild] = Counter()
        """Total failures of the slots of healthy workers."""
        self._places: defaultdict[tuple[str, int], dict[str, Pod]] = defaultdict(dict)
        """Workers of each slot, (group, index), by uid."""
        for pod in pods:
            self.put(pod)

    def put(self, pod: Pod) -> None:
        self.drop(pod.uid)
        self.pods[pod.uid] = pod
        if pod.role != "worker":
            self.others[pod.uid] = pod
            return
        place = self._places[pod.group, pod.index]
        self._take_out(place)
        place[pod.uid] = pod
        self._sort_in(place)

    def drop(self, uid: str) -> None:
        pod = self.pods.pop(uid, None)
        if pod is None:
            return
        if pod.role != "worker":
            del self.others[uid]
            return
        place = self._places[pod.group, pod.index]
        self._take_out(place)
        del place[uid]
        if place:
            self._sort_in(place)
        else:
            del self._places[pod.group, pod.index]

    def _sort_in(self, place: Mapping[str, Pod]) -> None:
        """Sort each pod of a slot into `healthy` or `others`."""
        if len(place) == 1:
            (pod,) = place.values()
            is_healthy = (
                pod.is_scheduled
                and pod.is_ready
                and not pod.failures
                and not pod.is_disrupted
                and pod.obstacle is Obstacle.NONE
                and pod.retiring_since is None
                and pod.draining_since is None
                and pod.stalled_since is None
            )
            if is_healthy:
                build = WorkerBuild(pod.group, pod.template, pod.base_image)
                self.healthy.setdefault(build, {})[pod.index] = pod
                self.restarts[build] += pod.restarts
                return
        self.others.update(place)

    def _take_out(self, place: Mapping[str, Pod]) -> None:
        """Undo `_sort_in`, before a slot changes."""
        for uid, pod in place.items():
            if self.others.pop(uid, None) is None:
                build = WorkerBuild(pod.group, pod.template, pod.base_image)
                del self.healthy[build][pod.index]
                self.restarts[build] -= pod.restarts
                if not self.healthy[build]:
                    del self.healthy[build], self.restarts[build]


@dataclass(slots=True)
class JobRecord:
    namespace: str
    job: Job | Unreadable | None = None
    version: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    """Parsed objects by uid."""
    pod_index: PodIndex = field(default_factory=PodIndex)
    """The pods among the members."""
    workload: Workload | None = None
    """The Workload among them."""
    attempts: dict[tuple[str, int], int] = field(default_factory=dict)
    """Highest attempt ever seen of each slot, by (group, index), including deleted pods."""
    epoch: int = 0
    """Highest epoch of a head ever seen."""

    @property
    def pods(self) -> tuple[Pod, ...]:
        return tuple(self.pod_index.pods.values())

    @property
    def heads(self) -> tuple[Pod, ...]:
        """Head pods, the newest last."""
        heads = (pod for pod in self.pod_index.others.values() if pod.role == "head")
        return tuple(sorted(heads, key=lambda pod: pod.epoch))

    @property
    def live_head(self) -> Pod | None:
        """The newest head, if it is live."""
        newest = self.heads[-1:]
        return newest[0] if newest and newest[0].is_live else None

    @property
    def children(self) -> dict[tuple[str, str], str]:
        """Digests of the job's children other than pods, by (kind, name); for a Workload, of the quota that it
        requests.
        """
        known = {(s.kind, s.name): s.fact for s in self.members.values() if isinstance(s.fact, str)}
        if self.workload is not None:
            known["Workload", self.workload.name] = self.workload.request
        return known


class Cache:
    def __init__(self) -> None:
        self._records: dict[str, JobRecord] = {}
        self._owners: dict[str, str] = {}
        """Owner of each member, by the member's uid."""
        self._tombstones: OrderedDict[str, float] = OrderedDict()
        """Deleted objects and the version at which each was gone: a late answer does not bring one back. A newer
        version does, because a watch also reports a deletion when an object loses the watched labels."""

    def see(self, raw: Mapping[str, Any], *, is_deleted: bool = False) -> str:
        """Store an object. Returns the uid of its job; empty if it has none, or if the version is not newer."""
        metadata = raw["metadata"]
        uid, version = str(metadata["uid"]), _version(metadata)
        if is_deleted:
            self.note_created(raw)
            return self._remove(uid, is_job=raw["kind"] == "CollectorJob", version=version)
        if version <= self._tombstones.get(uid, -1):
            return ""
        if raw["kind"] != "CollectorJob":
            return self._see_member(raw, uid, version)
        record = self._records.setdefault(uid, JobRecord(metadata["namespace"]))
        if record.job is not None and version <= record.version:
            return ""
        record.job, record.version = read_job(raw, before=record.job), version
        return uid

    def prune(self, kind: str, uids: Iterable[str], *, version: str, namespace: str = "") -> set[str]:
        """Forget objects that a complete list of a namespace (empty: all) did not show: an interrupted watch does not
        report deletions. Objects newer than the list's `version` are kept. Returns the uids of the affected jobs.
        """
        shown, limit = set(uids), int(version) if version.isdecimal() else 0
        listed = {uid: record for uid, record in self._records.items() if namespace in ("", record.namespace)}
        if is_job := kind == "CollectorJob":
            known = {uid: record.version for uid, record in listed.items() if record.job is not None}
        else:
            known = {u: m.version for record in listed.values() for u, m in record.members.items() if m.kind == kind}
        gone = [uid for uid, known_at in known.items() if uid not in shown and known_at <= limit]
        return {owner for uid in gone if (owner := self._remove(uid, is_job=is_job, version=limit))}

    def job(self, uid: str) -> Job | Unreadable | None:
        return self.record(uid).job

    def jobs(self, namespace: str = "") -> list[str]:
        return [
            uid
            for uid, record in self._records.items()
            if record.job is not None and namespace in ("", record.namespace)
        ]

    def record(self, uid: str) -> JobRecord:
        """The record of a job; empty for one that was never seen. Changes with the next event."""
        return self._records.get(uid) or JobRecord("")

    def is_past(self, manifest: Mapping[str, Any]) -> bool:
        """Whether this pod, or a later one in its place, was created before, by any operator."""
        role, place, number = pod_identity(manifest)
        record = self.record(controller_uid(manifest))
        return number <= (record.epoch if role == "head" else record.attempts.get(place, -1))

    def note_created(self, raw: Mapping[str, Any]) -> None:
        """Record that this pod existed, so that its name is never used again."""
        record = self._records.get(controller_uid(raw))
        if raw["kind"] != "Pod" or record is None:
            return
        role, place, number = pod_identity(raw)
        if role == "head":
            record.epoch = max(record.epoch, number)
        elif role == "worker":
            record.attempts[place] = max(record.attempts.get(place, -1), number)

    def forget(self, uid: str) -> None:
        self._remove(uid, is_job=False, version=math.inf)

    def _see_member(self, raw: Mapping[str, Any], uid: str, version: int) -> str:
        before = self.record(self._owners.get(uid, "")).members.get(uid)
        if before is not None and version <= before.version:
            return ""
        owner = controller_uid(raw)
        fact = _READERS.get(raw["kind"], digest_of)(raw)
        if not owner or fact is None:
            # Another client removed our labels or our owner reference.
            return self._remove(uid, is_job=False, version=version)
        record = self._records.setdefault(owner, JobRecord(raw["metadata"]["namespace"]))
        self.note_created(raw)
        record.members[uid] = Member(version, fact, raw["metadata"]["name"], raw["kind"])
        if isinstance(fact, Pod):
            record.pod_index.put(fact)
        if isinstance(fact, Workload):
            record.workload = fact
        self._owners[uid] = owner
        return owner

    def _remove(self, uid: str, *, is_job: bool, version: float) -> str:
        self._tombstones[uid] = max(version, self._tombstones.get(uid, -1))
        if len(self._tombstones) > _MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        owner = uid if is_job else self._owners.pop(uid, "")
        record = self._records.get(owner)
        if record is None:
            return ""
        if is_job:
            record.job = None
        else:
            record.members.pop(uid, None)
            record.pod_index.drop(uid)
            if record.workload is not None and record.workload.uid == uid:
                record.workload = None
        if record.job is None and not record.members:
            del self._records[owner]
        return owner


def _version(metadata: Mapping[str, Any]) -> int:
    text = metadata.get("resourceVersion") or ""
    return int(text) if text.isdecimal() else 0
