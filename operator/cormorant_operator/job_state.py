"""In-memory state of a job that the API server does not hold. Losing it at any time is harmless."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Literal

from cormorant_contract.status import CollectorJobStatus
from cormorant_operator.job import Identity
from cormorant_operator.pods import NodeFact
from cormorant_operator.workload import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Cumulative waiting times in seconds; they never decrease while the head lives."""

    consumer_s: float
    """Time in which a learner waited for a batch."""
    idle_s: Mapping[str, float]
    """Time without a batch to collect, by group, summed over its workers."""
    worker_s: Mapping[str, float]
    """Total time, by group, summed over its workers."""
    sizes: Mapping[str, int]
    """Number of workers by group during these times; all were ready and not paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAnswer:
    """A head's answer to a poll. Equal answers mean that nothing changed."""

    pod_uid: str
    phase: str
    frames: int
    settled: int = 0
    """Frames that no later head collects again."""
    per_second: float = 0.0
    version: int = 0
    min_applied_version: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Desired workers by group, as known to the head."""
    empty_slots: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Slots below the highest worker in which the head expects none, by group."""
    is_resizing: bool = False
    pause_state: Literal["running", "draining", "paused"] = "running"
    is_leased: bool = False
    """A client holds a pause lease."""
    is_spec_paused: bool = False
    """spec.paused as known to the head."""
    is_queue_full: bool = False
    """The queue is full, so workers wait."""
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Messages of its conditions Failed, EnvironmentsFailing and WeightsMissing, where it has them."""
    waits: Waits | None = None
    """Set for jobs with an autoscaled group while every worker is ready."""


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
    """Number of consecutive refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    error: str
    """Result of the dry run; empty: accepted."""
    at: datetime
    generation: int


WAITS_LAST_S = 120.0
"""Longest window of waiting times that `decide/view.py` uses."""
_ALWAYS = datetime.min.replace(tzinfo=UTC)
HeadState = Literal["answering", "silent", "refusing"]
HEAD_STATES: tuple[HeadState, ...] = ("answering", "silent", "refusing")


@dataclass(slots=True)
class JobState:
    # Read by decisions.
    led_since: datetime = _ALWAYS
    """Since when this operator has managed the job. Earlier states in the status may be outdated."""
    has_tokens: bool = False
    """The token Secret exists, as far as known since its last check."""
    answer: HeadAnswer | None = None
    """Last answer of a head."""
    answering_since: datetime | None = None
    """Since when the head has answered this operator without a gap; None: never."""
    answered_at: datetime | None = None
    waits: deque[tuple[datetime, Waits]] = field(default_factory=deque)
    """Waiting times from the newest answers, all of one head and one set of group sizes."""
    is_silent: bool = False
    """The head did not answer the last poll."""
    silence: str = ""
    """Why the head did not answer when its last silence began."""
    is_token_refused: bool = False
    """The head rejects the operator's token."""
    refused_since: datetime | None = None
    """Since when the head has rejected it, or since the Secret was replaced if that was later."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """Last refusal by group, "head", kind, or kind and name of what exists, until a request succeeds."""
    nodes: dict[str, NodeFact] = field(default_factory=dict)
    """Checked nodes, by name."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Dry runs, by template digest."""
    flavors: dict[tuple[str, str], Placement] = field(default_factory=dict)
    """Placement that ResourceFlavors add to pods, by name and by the admission (`Workload.admission`) for which they
    were read.
    """
    priorities: dict[str, int] = field(default_factory=dict)
    """Values of WorkloadPriorityClasses, by name."""

    # Used for scheduling by the controller.
    remade_at: float = -math.inf
    """Last attempt to recreate the token Secret, by the event loop's clock."""
    polled_at: float | None = None
    """Last poll of the head, by the event loop's clock."""
    polled_pod: str = ""
    """Uid of the head that was polled."""
    poll_s: float | None = None
    """Maximum age of the head's answer; None: there is no head to poll."""
    told: tuple[object, ...] = ()
    """Last commands sent to the head."""
    is_answer_due: bool = False
    """The next answer of the head must trigger a reconcile, because it was sent a command."""
    counters: tuple[Identity, CollectorJobStatus] | None = None
    """A counter-only status that waits for its write, and the version it is based on."""

    @property
    def head_state(self) -> HeadState | None:
        """How the head answered its last poll; None: no head to poll, or not polled yet."""
        if self.poll_s is None or self.polled_at is None:
            return None
        return "refusing" if self.is_token_refused else "silent" if self.is_silent else "answering"

    @property
    def head_report(self) -> tuple[HeadAnswer | None, bool, bool]:
        """The head's last answer; a change triggers a reconcile."""
        return self.answer, self.is_silent, self.is_token_refused

    def record_answer(self, answer: HeadAnswer, *, at: datetime, max_gap_s: float) -> None:
        """Record an answer. After a new head or a gap longer than `max_gap_s`, `answering_since` restarts."""
        is_same = self.answer is not None and self.answer.pod_uid == answer.pod_uid
        if not is_same or self.answered_at is None or (at - self.answered_at).total_seconds() > max_gap_s:
            self.answering_since = at
            self.waits.clear()
        if answer.waits is None or (self.waits and self.waits[-1][1].sizes != answer.waits.sizes):
            self.waits.clear()
        if answer.waits is not None:
            self.waits.append((at, answer.waits))
        while len(self.waits) > 2 and (at - self.waits[1][0]).total_seconds() >= WAITS_LAST_S:
            self.waits.popleft()
        self.answer, self.answered_at = answer, at
        self.is_silent = self.is_token_refused = False
        self.refused_since = None

    def refuse(self, owner: str, kind: RefusalKind, message: str, *, at: datetime) -> None:
        before = self.refusals.get(owner)
        count = before.count + 1 if before is not None and before.kind is kind else 1
        self.refusals[owner] = Refusal(kind=kind, message=message, at=at, count=count)
