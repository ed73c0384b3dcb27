"""In-memory state of a job that the API server does not hold. Losing it at any time is harmless."""

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
"""Minimum interval between attempts to recreate a token Secret."""


@dataclass(slots=True)
class JobState:
    has_tokens: bool = False
    answer: HeadAnswer | None = None
    answering_since: datetime | None = None
    """Since when the head has answered without a gap."""
    answered_at: datetime | None = None
    is_silent: bool = False
    distrust: str = ""
    """Why the operator does not trust the head's certificate."""
    is_token_refused: bool = False
    """The head rejects the operator's token."""
    remade_at: float = -math.inf
    """Last attempt to recreate the token Secret, by the event loop's clock."""
    polled_at: float | None = None
    """Last poll of the head, by the event loop's clock."""
    polled_pod: str = ""
    """Uid of the head that was polled."""
    poll_s: float | None = None
    """Maximum age of the head's answer; None: there is no head to poll."""
    still_polls: int = 0
    """Polls in a row whose answer was the one before."""
    told: tuple[SetDesired | DrainHead, ...] = ()
    """Last commands sent to the head."""
    is_answer_due: bool = False
    """The next answer of the head must trigger a reconcile, because it was sent a command."""
    counters: tuple[Identity, CollectorJobStatus] | None = None
    """A counter-only status that waits for its write, and the version it is based on."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    nodes: dict[str, NodeFact] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def head_report(self) -> tuple[HeadAnswer | None, bool, bool, str]:
        """The head's last answer; a change triggers a reconcile."""
        return self.answer, self.is_silent, self.is_token_refused, self.distrust

    def may_remake_tokens(self, now: float) -> bool:
        """Whether the token Secret may be recreated now; if so, the attempt is recorded."""
        is_time = now - self.remade_at >= _REMAKE_S
        self.remade_at = now if is_time else self.remade_at
        return is_time

    def record_answer(self, answer: HeadAnswer, *, at: datetime, max_gap_s: float) -> None:
        """Record an answer. A new head or a gap of more than `max_gap_s` restarts `answering_since`."""
        is_same = self.answer is not None and self.answer.pod_uid == answer.pod_uid
        if not is_same or self.answered_at is None or (at - self.answered_at).total_seconds() > max_gap_s:
            self.answering_since = at
        self.answer, self.answered_at = answer, at
        self.is_silent = self.is_token_refused = False
        self.distrust = ""

    def refuse(self, owner: str, kind: RefusalKind, message: str, *, at: datetime) -> None:
        before = self.refusals.get(owner)
        count = before.count + 1 if before is not None and before.kind is kind else 1
        self.refusals[owner] = Refusal(kind=kind, message=message, at=at, count=count)

    def forget_refusals(self, pods: Collection[str]) -> None:
        """Forget refusals about pods other than `pods`, the names of those that exist."""
        gone = [key for key in self.refusals if key.startswith(POD_OWNER) and key.removeprefix(POD_OWNER) not in pods]
        for key in gone:
            del self.refusals[key]

    def judge(self, template: str, verdict: Verdict) -> None:
        """Record the result of a dry run."""
        self.verdicts.pop(template, None)
        self.verdicts[template] = verdict
        while len(self.verdicts) > _MAX_VERDICTS:
            del self.verdicts[next(iter(self.verdicts))]


HeadState = Literal["answering", "silent", "refusing"]
HEAD_STATES: tuple[HeadState, ...] = ("answering", "silent", "refusing")
_MIN_SILENT = 3


class Census:
    """How the head of each job answered its last poll."""

    def __init__(self) -> None:
        self.counts: Counter[HeadState] = Counter()
        self._states: dict[str, HeadState] = {}

    def note(self, uid: str, state: HeadState) -> None:
        self.forget(uid)
        self._states[uid] = state
        self.counts[state] += 1

    def forget(self, uid: str) -> None:
        """The job has no head to poll."""
        if (before := self._states.pop(uid, None)) is not None:
            self.counts[before] -= 1

    @property
    def is_cut_off(self) -> bool:
        """Whether so many heads are silent at once that the operator's own network is the likely cause."""
        silent = self.counts["silent"]
        return silent >= _MIN_SILENT and 2 * silent > self.counts.total()
