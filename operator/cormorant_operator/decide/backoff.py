"""Backoff after a failed pod, computed from the pod alone, so that it survives a restart of the operator."""

from datetime import datetime, timedelta

from cormorant_operator.observed import Pod

RESET_AFTER_S = 600.0
"""A pod that ran this long was healthy: its failure counts as the first."""
_BASE_S = 10.0
_MAX_S = 360.0
_BLOCKED_S = 120.0
"""After a blocked pod (EXIT_BLOCKED), which is not counted as a failure."""
_REJECTED_S = 30.0
"""After a kubelet rejected a pod. It is not counted, so it does not grow."""


def failures_after(pod: Pod) -> int:
    if not pod.is_failure:
        return pod.failures
    is_first = pod.ran_s >= RESET_AFTER_S and pod.stalled_since is None
    return 1 if is_first else pod.failures + 1


def restarts_after(pod: Pod) -> int:
    return pod.restarts + pod.is_failure


def delay_s(failures: int) -> float:
    """Seconds before the next attempt: none after the first failure, then 10, 20, 40 ... 360."""
    if failures <= 1:
        return 0.0
    # Bound the exponent: 2.0 ** 5000 overflows.
    return min(_MAX_S, _BASE_S * 2.0 ** min(failures - 2, 16))


def next_attempt_at(pod: Pod) -> datetime:
    """When the slot of a failed pod may be refilled."""
    if pod.is_blocked:
        return (pod.ended or pod.created) + timedelta(seconds=_BLOCKED_S)
    if pod.is_rejected:
        return pod.created + timedelta(seconds=_REJECTED_S)
    return (pod.ended or pod.created) + timedelta(seconds=delay_s(failures_after(pod)))


def refusal_delay_s(count: int) -> float:
    """Seconds before a request is repeated that the API server refused n times: 5, 10, 20, 40, 60, 60 ..."""
    return min(60.0, 5.0 * 2.0 ** min(count - 1, 16))
