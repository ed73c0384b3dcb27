"""Slots: the places (group, index) of workers, and the pods that fill them.

    empty -> filled by attempt 0 -> its pod ends, is deleted or lost -> empty -> filled by attempt 1 ...

A live pod is neither terminating nor ended nor on a lost node; a slot has at most one. The last failed pod is kept
until its successor has been ready for a while, as the record of the failure and its backoff.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cormorant_operator.decide.backoff import RESET_AFTER_S, failures_after, next_attempt_at, restarts_after
from cormorant_operator.observed import Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacancy:
    attempt: int
    failures: int
    restarts: int
    not_before: datetime | None
    """None: now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A slot and its existing pods, the newest attempt last."""

    index: int
    pods: tuple[Pod, ...] = ()
    last_attempt: int = -1
    """Highest attempt ever seen, including deleted pods; -1: none.

    Names are not reused: one of two operators may see a pod's end and refill the slot before the other notices. Both
    then create the same successor, and the API server accepts one of them."""

    @property
    def newest(self) -> Pod | None:
        """The pod with the highest attempt, live or not."""
        return self.pods[-1] if self.pods else None

    @property
    def live(self) -> Pod | None:
        return next((pod for pod in reversed(self.pods) if pod.is_live), None)

    @property
    def superseded(self) -> tuple[Pod, ...]:
        """Live pods of earlier attempts, which returned with a node that was given up."""
        return tuple(pod for pod in self.pods if pod.is_live and pod is not self.live)

    @property
    def restarts(self) -> int:
        return max((restarts_after(pod) for pod in self.pods), default=0)

    def vacancy(self, template: str) -> Vacancy:
        """How to fill the slot. Failures of another template do not count: the user has changed what failed."""
        newest = self.newest
        if newest is None:
            return Vacancy(attempt=self.last_attempt + 1, failures=0, restarts=0, not_before=None)
        is_same = newest.template == template
        return Vacancy(
            attempt=max(newest.attempt, self.last_attempt) + 1,
            failures=failures_after(newest) if is_same else 0,
            restarts=self.restarts,
            not_before=next_attempt_at(newest) if is_same and newest.must_wait else None,
        )

    def failures(self, template: str) -> int:
        newest = self.newest
        return failures_after(newest) if newest is not None and newest.template == template else 0

    def leftovers(self, now: datetime) -> tuple[tuple[Pod, ...], datetime | None]:
        """Ended pods that can be deleted, and when the next one can."""
        ended = [pod for pod in self.pods if pod.is_terminal and not pod.is_terminating]
        record = [pod for pod in ended if pod.is_failure][-1:]
        over = [pod for pod in ended if pod is not self.newest and pod not in record]
        live = self.live
        if not record or record[0] is self.newest or live is None:
            return tuple(over), None
        if record[0].has_sidecar:
            return (*over, *record), None  # its failure count is in the annotations of its successor
        if live.ready_since is None:
            return tuple(over), None
        until = live.ready_since + timedelta(seconds=RESET_AFTER_S)
        return ((*over, *record), None) if now >= until else (tuple(over), until)


def slots_of(pods: Sequence[Pod], places: Iterable[int], *, attempts: Mapping[int, int]) -> tuple[Slot, ...]:
    """Slots of a group, by index. `places`: indices with or without pods; `attempts`: highest ever seen, by index."""
    by_index: dict[int, list[Pod]] = {index: [] for index in places}
    for pod in pods:
        by_index.setdefault(pod.index, []).append(pod)
    return tuple(
        Slot(
            index=index,
            pods=tuple(sorted(found, key=lambda pod: (pod.attempt, pod.created, pod.name))),
            last_attempt=attempts.get(index, -1),
        )
        for index, found in sorted(by_index.items())
    )
