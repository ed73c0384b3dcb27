"""The facts that `reconcile` decides by, as plain values: pods, a head's answer, what the API server refused."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Literal, NamedTuple

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
Role = Literal["head", "worker", "canary"]

EXIT_REFUSED, EXIT_BLOCKED = 2, 3
"""Exit codes of a head: invalid configuration; a broken environment that someone must repair first."""


class Obstacle(Enum):
    """Why a pod does not start."""

    NONE = ""
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL = "ImagePull"
    CONTAINER_CONFIG = "ContainerConfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod of the job.

    Pending -> Running (not ready <-> ready) -> Succeeded | Failed; terminating from the moment it is deleted.
    """

    name: str
    uid: str
    role: Role
    created: datetime
    group: str = ""
    index: int = 0
    attempt: int = 0
    """Number of pods that filled the slot before."""
    epoch: int = 0
    """Epoch of a head; 0 for other pods."""
    template: str = ""
    """Digest of the template it was created from."""
    base_image: str = ""
    cuda_image: str = ""
    """Image of the workers with a device, as the head's pod was created with; empty: base_image."""
    image: str = ""
    """Image of its own container."""
    failures: int = 0
    """Consecutive failures before this pod."""
    restarts: int = 0
    """All failures of the slot before this pod."""
    phase: PodPhase = "Pending"
    is_scheduled: bool = False
    scheduled_since: datetime | None = None
    ready_since: datetime | None = None
    unready_since: datetime | None = None
    deletion_deadline: datetime | None = None
    """End of its grace period; set once the pod is deleted."""
    has_sidecar: bool = False
    """Its own container ended, but another one is still running."""
    is_rejected: bool = False
    """The kubelet rejected it; none of its containers ran."""
    node: str = ""
    is_taint_evicted: bool = False
    """Deleted because of a taint: its node is lost, or healthy but reserved."""
    is_disrupted: bool = False
    """Evicted, preempted, rejected by the kubelet, or its node was drained or lost: not its own failure."""
    obstacle: Obstacle = Obstacle.NONE
    obstacle_message: str = ""
    reason: str = ""
    """Why it ended, as Kubernetes says."""
    exit_code: int | None = None
    message: str = ""
    """Why it ended, from its termination message."""
    settled_frames: int | None = None
    """Settled frames from a head's termination message; None if it has none."""
    ended: datetime | None = None
    ran_s: float = 0.0
    """Run time of its container, once it ended."""
    retiring_since: datetime | None = None
    draining_since: datetime | None = None
    stalled_since: datetime | None = None
    ip: str = ""
    is_tls: bool = False
    """A head that speaks HTTPS alone."""

    @property
    def is_terminating(self) -> bool:
        return self.deletion_deadline is not None

    @property
    def is_terminal(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_live(self) -> bool:
        """Whether it fills its slot: neither deleted, nor ended, nor on a lost node."""
        return not self.is_terminating and not self.is_terminal and self.phase != "Unknown"

    @property
    def is_ready(self) -> bool:
        return self.is_live and self.ready_since is not None

    @property
    def is_blocked(self) -> bool:
        """Whether it ended with EXIT_BLOCKED: its environment lacks a disk or a device; not a failure of its own."""
        return self.role != "canary" and self.is_terminal and self.exit_code == EXIT_BLOCKED

    @property
    def must_wait(self) -> bool:
        """Whether its successor starts after a backoff."""
        return self.is_failure or ((self.is_rejected or self.is_blocked) and not self.is_terminating)

    @property
    def starting_since(self) -> datetime | None:
        """Since when it could have become ready; None if it is not scheduled."""
        moments = (self.scheduled_since or self.created, self.unready_since)
        return max(moment for moment in moments if moment is not None) if self.is_scheduled else None

    @property
    def is_asked(self) -> bool:
        """Whether a head can be polled: it is ready, or it is draining."""
        return bool(self.ip) and (self.is_ready or (self.is_live and self.draining_since is not None))

    @property
    def is_failure(self) -> bool:
        """Whether its end counts as a failure: not a disruption, and not requested by the operator."""
        if self.stalled_since is not None:
            return True
        is_done = self.role == "head" and self.phase == "Succeeded"
        if self.is_blocked or is_done:
            return False
        return self.is_terminal and not (self.is_terminating or self.is_disrupted or self.draining_since is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Who has waited for whom, in seconds that only grow while the head lives."""

    consumer_s: float
    """A learner waited for a batch."""
    idle_s: Mapping[str, float]
    """Workers had no batch to collect, by group, summed over its workers."""
    worker_s: Mapping[str, float]
    """Seconds of all workers together, by group."""
    is_settled: bool
    """Every group has as many ready workers as it should, and the fleet is not paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitShares:
    """Shares of a period in which every group kept its size."""

    seconds: float
    sizes: Mapping[str, int]
    """Workers by group."""
    consumer: float
    """Share of the time that a learner waited."""
    idle: Mapping[str, float]
    """Share of the workers' time without a ticket, by group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """A head's answer to a poll. Equal answers contain no news."""

    pod_uid: str
    phase: str
    frames: int
    settled: int = 0
    """Frames that no later head collects again."""
    per_second: float = 0.0
    version: int = 0
    min_applied_version: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Desired workers by group, as the head has them."""
    empty_slots: Mapping[str, tuple[int, ...]] | None = field(default_factory=dict)
    """Slots below the highest worker that the head was told to expect none in, by group. None: an older head, which
    can be told sizes alone."""
    is_resizing: bool = False
    pause_state: Literal["running", "draining", "paused"] = "running"
    is_leased: bool = False
    """A client holds a pause lease."""
    is_spec_paused: bool = False
    """spec.paused as the head has it."""
    is_queue_full: bool = False
    """The queue is full, so workers wait."""
    failure: str = ""
    env_failures: str = ""
    """Environments keep failing: the first failure with its traceback. Empty: they do not."""
    waits: Waits | None = None
    """Set for jobs with an autoscaled group. None: an older head."""


POD_OWNER = "pod/"
"""Prefix of the keys of refusals about existing pods."""


class RefusalKind(Enum):
    """Why the API server rejected a request."""

    QUOTA = "QuotaExceeded"
    NAMESPACE = "NamespaceTerminating"
    CONFLICT = "NameConflict"
    LEAVING = "NameNotFreeYet"
    INVALID = "InvalidPodTemplate"
    FORBIDDEN = "Forbidden"
    SERVER = "ApiServerError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    kind: RefusalKind
    message: str
    at: datetime
    count: int = 1
    """Consecutive refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    error: str
    """Result of the dry run; empty: accepted."""
    at: datetime
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    is_lost: bool
    """The node is gone or not ready, or has the out-of-service taint."""
    at: datetime


Place = tuple[str, int]
"""A slot, by group and index."""


class WorkerBuild(NamedTuple):
    group: str
    template: str
    base_image: str


class PodIndex:
    """The pods of one job. Changed by the cache only, between two reconciles."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        """Every pod by uid."""
        self.others: dict[str, Pod] = {}
        """Heads, canaries, and workers that are not healthy, by uid."""
        self.healthy: dict[WorkerBuild, dict[int, Pod]] = {}
        """Healthy workers by what they were made from, and by index."""
        self.restarts: Counter[WorkerBuild] = Counter()
        """Failures that the slots of healthy workers ever had."""
        self._places: defaultdict[Place, dict[str, Pod]] = defaultdict(dict)
        """Workers of each slot, by uid."""

    @classmethod
    def of(cls, pods: Iterable[Pod]) -> "PodIndex":
        pod_index = cls()
        for pod in pods:
            pod_index.put(pod)
        return pod_index

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
        """Each pod of a slot is healthy or goes to `others`."""
        if len(place) == 1:
            (pod,) = place.values()
            if _is_healthy(pod):
                build = _build_of(pod)
                self.healthy.setdefault(build, {})[pod.index] = pod
                self.restarts[build] += pod.restarts
                return
        self.others.update(place)

    def _take_out(self, place: Mapping[str, Pod]) -> None:
        """The opposite, before a slot changes."""
        for uid, pod in place.items():
            if self.others.pop(uid, None) is None:
                build = _build_of(pod)
                del self.healthy[build][pod.index]
                self.restarts[build] -= pod.restarts
                if not self.healthy[build]:
                    del self.healthy[build], self.restarts[build]


def _is_healthy(pod: Pod) -> bool:
    return (
        pod.ready_since is not None
        and pod.is_scheduled
        and pod.is_ready
        and not pod.failures
        and not pod.is_disrupted
        and pod.obstacle is Obstacle.NONE
        and pod.retiring_since is None
        and pod.draining_since is None
        and pod.stalled_since is None
    )


def _build_of(pod: Pod) -> WorkerBuild:
    return WorkerBuild(pod.group, pod.template, pod.base_image)
