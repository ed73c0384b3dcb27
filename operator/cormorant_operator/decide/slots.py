"""Slots: the places (group, index) of workers, and the pods that fill them.

    empty -> filled by attempt 0 -> its pod ends, is deleted or lost -> empty -> filled by attempt 1 ...

A live pod is neither terminating nor ended nor on a lost node; a slot has at most one. The last failed pod is kept
until its successor has been ready for a while, as the record of the failure and its backoff. The backoff is computed
from that pod alone, so that it survives a restart of the operator.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from cormorant_operator.pods import EXIT_STARVED, Pod

RESET_AFTER_S = 600.0
"""A pod that ran this long was healthy: its failure counts as the first."""
_BASE_S = 10.0
_MAX_S = 360.0
_BLOCKED_S, _STARVED_S = 120.0, 10.0
"""Delays after a pod that lacked a disk or a device, and after one that lacked CPU time. Not counted as failures."""
_REJECTED_S = 30.0
"""Delay after a kubelet rejected a pod. Rejections are not counted, so the delay does not grow."""


def failures_after(pod: Pod) -> int:
    if not pod.is_failure:
        return pod.failures
    is_first = pod.ran_s >= RESET_AFTER_S and pod.stalled_since is None
    return 1 if is_first else pod.failures + 1


def next_attempt_at(pod: Pod) -> datetime:
    """When the slot of a failed pod may be refilled."""
    if pod.is_blocked:
        wait_s = _STARVED_S if pod.exit_code == EXIT_STARVED else _BLOCKED_S
        return (pod.ended or pod.created) + timedelta(seconds=wait_s)
    if pod.is_rejected:
        return pod.created + timedelta(seconds=_REJECTED_S)
    # None after the first failure, then 10, 20, 40 ... 360 s. The exponent is bounded: 2.0 ** 5000 overflows.
    failures = failures_after(pod)
    wait_s = min(_MAX_S, _BASE_S * 2.0 ** min(failures - 2, 16)) if failures > 1 else 0.0
    return (pod.ended or pod.created) + timedelta(seconds=wait_s)


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
    def restarts(self) -> int:
        return max((pod.restarts + pod.is_failure for pod in self.pods), default=0)

    def failures(self, template: str) -> int:
        """Consecutive failures. Those of another template do not count: the user has changed it since."""
        newest = self.newest
        return failures_after(newest) if newest is not None and newest.template == template else 0

    def waits_until(self, template: str) -> datetime | None:
        """When the next attempt may start after a failure of this template; None: it need not wait."""
        newest = self.newest
        return next_attempt_at(newest) if newest and newest.template == template and newest.must_wait else None

    def leftovers(self, now: datetime) -> tuple[list[Pod], datetime | None]:
        """Ended pods that can be deleted, and when the next one can."""
        ended = [pod for pod in self.pods if pod.is_terminal and not pod.is_terminating]
        record = [pod for pod in ended if pod.is_failure][-1:]
        over = [pod for pod in ended if pod is not self.newest and pod not in record]
        live = self.live
        if not record or record[0] is self.newest or live is None:
            return over, None
        until = live.ready_since + timedelta(seconds=RESET_AFTER_S) if live.ready_since is not None else None
        # A pod with a running sidecar occupies its node; its failure count is in the annotations of its successor.
        if record[0].has_sidecar or (until is not None and now >= until):
            return over + record, None
        return over, until
