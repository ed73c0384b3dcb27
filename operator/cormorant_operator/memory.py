"""What the operator knows of a job beside what the cluster shows; all of it may be forgotten at any time."""

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime

from cormorant_contract.status import CollectorJobStatus
from cormorant_operator.job import Identity
from cormorant_operator.observed import HeadAnswer, Refusal, RefusalKind, Verdict
from cormorant_operator.plan import POD_OWNER, DrainHead, TellHead

_MOST_VERDICTS = 64


@dataclass(slots=True)
class Memory:
    """One job's."""

    has_tokens: bool = False
    answer: HeadAnswer | None = None
    is_silent: bool = False
    polled_at: float | None = None
    """When its head was asked last, by the event loop's clock."""
    polled_pod: str = ""
    """Uid of the head that was asked."""
    poll_s: float | None = None
    """How old its answer may get; None: nobody is to be asked."""
    told: tuple[TellHead | DrainHead, ...] = ()
    """What its head was told last."""
    is_answer_due: bool = False
    """Its head was told something: the next answer shows whether it took it."""
    counters: tuple[Identity, CollectorJobStatus] | None = None
    """A status of which only counters are new, and the version that it follows; it waits for its turn."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

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
        while len(self.verdicts) > _MOST_VERDICTS:
            del self.verdicts[next(iter(self.verdicts))]
