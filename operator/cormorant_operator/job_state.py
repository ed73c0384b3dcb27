"""What the operator knows of a job beside what the cluster shows; all of it may be forgotten at any time."""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from cormorant_contract.status import CollectorJobStatus
from cormorant_operator.decide.plan import POD_OWNER, DrainHead, SetDesired
from cormorant_operator.job import Identity
from cormorant_operator.observed import HeadAnswer, NodeFact, Refusal, RefusalKind, Verdict

_MAX_VERDICTS = 64
_REMAKE_S = 30.0
"""Between two looks to a Secret whose tokens a head does not take."""


@dataclass(slots=True)
class JobState:
    has_tokens: bool = False
    answer: HeadAnswer | None = None
    answering_since: datetime | None = None
    """From when on the head has answered without a gap."""
    answered_at: datetime | None = None
    """When it answered last."""
    is_silent: bool = False
    is_token_refused: bool = False
    """The head does not take the operator's token."""
    remade_at: float = -math.inf
    """When the Secret was looked to because the head does not take the operator's token, by the event loop's clock."""
    polled_at: float | None = None
    """When its head was asked last, by the event loop's clock."""
    polled_pod: str = ""
    """Uid of the head that was asked."""
    poll_s: float | None = None
    """How old its answer may get; None: nobody is to be asked."""
    told: tuple[SetDesired | DrainHead, ...] = ()
    """What its head was told last."""
    is_answer_due: bool = False
    """Its head was told something: the next answer shows whether it took it."""
    counters: tuple[Identity, CollectorJobStatus] | None = None
    """A status of which only counters are new, and the version that it follows; it waits for its turn."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    nodes: dict[str, NodeFact] = field(default_factory=dict)
    """Nodes that were looked at."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def head_report(self) -> tuple[HeadAnswer | None, bool, bool]:
        """What its head said last; when it changes, there is something new to decide."""
        return self.answer, self.is_silent, self.is_token_refused

    def may_remake_tokens(self, now: float) -> bool:
        """Whether it is time to see to the Secret again; then it counts as done."""
        is_time = now - self.remade_at >= _REMAKE_S
        self.remade_at = now if is_time else self.remade_at
        return is_time

    def record_answer(self, answer: HeadAnswer, *, at: datetime, max_gap_s: float) -> None:
        """The head answered. After a longer gap, or of another head, nothing before it is known first-hand."""
        is_same = self.answer is not None and self.answer.pod_uid == answer.pod_uid
        if not is_same or self.answered_at is None or (at - self.answered_at).total_seconds() > max_gap_s:
            self.answering_since = at
        self.answer, self.answered_at = answer, at
        self.is_silent = self.is_token_refused = False

    def refuse(self, owner: str, kind: RefusalKind, message: str, *, at: datetime) -> None:
        """Something was refused, again or for the first time."""
        before = self.refusals.get(owner)
        count = before.count + 1 if before is not None and before.kind is kind else 1
        self.refusals[owner] = Refusal(kind=kind, message=message, at=at, count=count)

    def forget_refusals(self, pods: Collection[str]) -> None:
        """Forget refusals about pods that are gone.

        Args:
            pods: names of those that exist.
        """
        gone = [key for key in self.refusals if key.startswith(POD_OWNER) and key.removeprefix(POD_OWNER) not in pods]
        for key in gone:
            del self.refusals[key]

    def judge(self, template: str, verdict: Verdict) -> None:
        """A dry run was answered."""
        self.verdicts.pop(template, None)
        self.verdicts[template] = verdict
        while len(self.verdicts) > _MAX_VERDICTS:
            del self.verdicts[next(iter(self.verdicts))]


HeadState = Literal["answering", "silent", "refusing"]
HEAD_STATES: tuple[HeadState, ...] = ("answering", "silent", "refusing")
_MIN_SILENT = 3


class Census:
    """How the heads of all jobs answered when they were asked last."""

    def __init__(self) -> None:
        self.counts: Counter[HeadState] = Counter()
        """Heads by state."""
        self._states: dict[str, HeadState] = {}

    def note(self, uid: str, state: HeadState) -> None:
        """The head of a job was asked."""
        self.forget(uid)
        self._states[uid] = state
        self.counts[state] += 1

    def forget(self, uid: str) -> None:
        """A job has no head to ask."""
        if (before := self._states.pop(uid, None)) is not None:
            self.counts[before] -= 1

    @property
    def is_cut_off(self) -> bool:
        """Whether so many are silent at once that the fault is rather here, or between, than there."""
        silent = self.counts["silent"]
        return silent >= _MIN_SILENT and 2 * silent > self.counts.total()
