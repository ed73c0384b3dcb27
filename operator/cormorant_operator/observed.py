"""What exists: the facts that `reconcile` decides by. Plain values, made by `pod_facts`, `world` and `head_client`."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Literal, NamedTuple

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
Role = Literal["head", "worker", "canary"]

EXIT_REFUSED, EXIT_BLOCKED = 2, 3
"""Exit codes of a head: it cannot use what it was given; its surroundings have to be put right first."""


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
    """Pods that filled the slot before."""
    epoch: int = 0
    """Of a head."""
    template: str = ""
    """Digest of what it was made from."""
    base_image: str = ""
    image: str = ""
    """Of its own container."""
    failures: int = 0
    """Failures in a row before this pod."""
    restarts: int = 0
    """All failures of the slot before this pod."""
    phase: PodPhase = "Pending"
    is_scheduled: bool = False
    scheduled_since: datetime | None = None
    """When it was given its node."""
    ready_since: datetime | None = None
    unready_since: datetime | None = None
    deletion_deadline: datetime | None = None
    """Set from the moment that it is deleted: when its grace is over."""
    has_sidecar: bool = False
    """Its own container ended, and another one runs on."""
    is_rejected: bool = False
    """Its node's kubelet did not take it: none of its containers ever ran."""
    node: str = ""
    """Name of its node."""
    is_taint_evicted: bool = False
    """It is deleted because of a taint: its node is lost, or healthy and wanted for something else."""
    is_disrupted: bool = False
    """Evicted, preempted, refused by its kubelet, or its node was drained or lost: no fault of its own."""
    obstacle: Obstacle = Obstacle.NONE
    obstacle_message: str = ""
    reason: str = ""
    """Why it ended, in Kubernetes' word."""
    exit_code: int | None = None
    message: str = ""
    """Why its container ended, in its own last words."""
    settled_frames: int | None = None
    """Frames that a head's last words say are settled; None: they do not say."""
    ended: datetime | None = None
    ran_s: float = 0.0
    """How long its container ran, once it ended."""
    retiring_since: datetime | None = None
    draining_since: datetime | None = None
    stalled_since: datetime | None = None
    ip: str = ""
    is_tls: bool = False
    """A head that speaks HTTPS alone."""

    @property
    def is_terminating(self) -> bool:
        """Whether it was deleted and is not gone yet."""
        return self.deletion_deadline is not None

    @property
    def is_terminal(self) -> bool:
        """Whether its containers ended for good."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_live(self) -> bool:
        """Whether it fills its slot: not terminating, not terminal, not on a lost node."""
        return not self.is_terminating and not self.is_terminal and self.phase != "Unknown"

    @property
    def is_ready(self) -> bool:
        return self.is_live and self.ready_since is not None

    @property
    def is_blocked(self) -> bool:
        """Whether a head ended because its surroundings have to be put right first: a restart alone mends nothing."""
        return self.role == "head" and self.is_terminal and self.exit_code == EXIT_BLOCKED

    @property
    def must_wait(self) -> bool:
        """Whether its successor begins after a while, and not at once."""
        return self.is_failure or ((self.is_rejected or self.is_blocked) and not self.is_terminating)

    @property
    def starting_since(self) -> datetime | None:
        """From when on it could have become ready; None: it has no node yet."""
        moments = (self.scheduled_since or self.created, self.unready_since)
        return max(moment for moment in moments if moment is not None) if self.is_scheduled else None

    @property
    def is_asked(self) -> bool:
        """Whether a head is spoken to: it works, or it was told to drain, and may be unready meanwhile."""
        return bool(self.ip) and (self.is_ready or (self.is_live and self.draining_since is not None))

    @property
    def is_failure(self) -> bool:
        """Whether its end counts: by itself, and by no disruption or order of ours."""
        if self.stalled_since is not None:
            return True
        if self.is_blocked:
            return False
        return self.is_terminal and not (self.is_terminating or self.is_disrupted or self.draining_since is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """What the head said of itself last. Two that are equal tell nothing new."""

    pod_uid: str
    phase: str
    frames: int
    settled: int = 0
    """Frames that no later head collects again."""
    per_second: float = 0.0
    version: int = 0
    min_applied_version: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Workers by group, as the head was asked last."""
    empty_slots: Mapping[str, tuple[int, ...]] | None = field(default_factory=dict)
    """Slots below the highest worker that the head was told to expect none in, by group. None: an older head, which
    can be told sizes alone."""
    is_resizing: bool = False
    pause_state: Literal["running", "draining", "paused"] = "running"
    is_leased: bool = False
    """Somebody holds the fleet still, beside spec.paused."""
    is_spec_paused: bool = False
    """What the head believes spec.paused to be."""
    is_queue_full: bool = False
    """Batches wait for consumers, and workers for the queue."""
    failure: str = ""


class RefusalKind(Enum):
    """Why the API server did not create something."""

    QUOTA = "QuotaExceeded"
    NAMESPACE = "NamespaceTerminating"
    CONFLICT = "NameConflict"
    LEAVING = "NameNotFreeYet"
    INVALID = "InvalidPodTemplate"
    FORBIDDEN = "Forbidden"
    SERVER = "ApiServerError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The API server would not create something, for now."""

    kind: RefusalKind
    message: str
    at: datetime
    count: int = 1
    """Refusals in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a dry run said of a template."""

    error: str
    """Empty: it is fine."""
    at: datetime
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    """What was seen of a node."""

    is_lost: bool
    """It is gone, its kubelet does not report, or a person has declared it out of service."""
    at: datetime


Place = tuple[str, int]
"""A slot, by group and index."""


class WorkerBuild(NamedTuple):
    """What calm workers were made from."""

    group: str
    template: str
    base_image: str


class PodIndex:
    """The pods of one job. Changed by the cache only, between two reconciles."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        """Every pod by uid."""
        self.others: dict[str, Pod] = {}
        """Heads, canaries, and workers that are not calm, by uid."""
        self.calm: dict[WorkerBuild, dict[int, Pod]] = {}
        """Calm workers by what they were made from, and by index."""
        self.restarts: Counter[WorkerBuild] = Counter()
        """Failures that the slots of calm workers ever had."""
        self._places: defaultdict[Place, dict[str, Pod]] = defaultdict(dict)
        """Workers of each slot, by uid."""

    @classmethod
    def of(cls, pods: Iterable[Pod]) -> "PodIndex":
        """The pod_index of some pods."""
        pod_index = cls()
        for pod in pods:
            pod_index.put(pod)
        return pod_index

    def put(self, pod: Pod) -> None:
        """A pod is there, or has changed."""
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
        """Each pod of a slot becomes calm or others."""
        if len(place) == 1:
            (pod,) = place.values()
            if _is_calm(pod):
                build = _build_of(pod)
                self.calm.setdefault(build, {})[pod.index] = pod
                self.restarts[build] += pod.restarts
                return
        self.others.update(place)

    def _take_out(self, place: Mapping[str, Pod]) -> None:
        """The opposite, before a slot changes."""
        for uid, pod in place.items():
            if self.others.pop(uid, None) is None:
                build = _build_of(pod)
                del self.calm[build][pod.index]
                self.restarts[build] -= pod.restarts
                if not self.calm[build]:
                    del self.calm[build], self.restarts[build]


def _is_calm(pod: Pod) -> bool:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything of one job at one moment."""

    pods: tuple[Pod, ...] = ()
    pod_index: PodIndex | None = None
    """The same pods, sorted by whether they need a look; None: to be made of them."""
    attempts: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Highest attempt that was ever seen of each slot, by group and index: also of pods that are gone."""
    epoch: int = 0
    """Highest epoch of a head that was ever seen."""
    children: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Digests of the job's Services and ConfigMaps, by kind and name."""
    has_tokens: bool = False
    """This operator has seen to the Secret since its last full look."""
    answer: HeadAnswer | None = None
    """The last answer of the newest head."""
    answering_since: datetime | None = None
    """From when on this operator has heard the newest head, without a gap. None: it has not, since it began to lead."""
    answered_at: datetime | None = None
    """When it answered last."""
    is_silent: bool = False
    """The head was asked after that, and did not answer."""
    distrust: str = ""
    """Why the operator does not trust the head's certificate; empty: it does, or the head has none."""
    is_token_refused: bool = False
    """The head did answer: it does not take the operator's token."""
    is_cut_off: bool = False
    """So many heads are silent at once that the fault is this operator's, or the network's, and not theirs."""
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By group, "head" or the kind of another child; the last one of each, until a creation works."""
    nodes: Mapping[str, NodeFact] = field(default_factory=dict)
    """Nodes that were looked at, by name."""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """Dry runs by digest of the template."""
