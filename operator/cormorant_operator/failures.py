"""`status.recentFailures`: the last pods that ended badly."""

from collections.abc import Iterable

from cormorant_contract.status import CollectorJobStatus, Failure
from cormorant_operator.observed import Pod

_MOST = 10
_LONGEST_REASON = 128
_LONGEST_MESSAGE = 512


def recent_failures(status: CollectorJobStatus, pods: Iterable[Pod]) -> tuple[Failure, ...]:
    """Those of the status and those that are seen now, each once, the newest last.

    The same pods give the same list however often it is made.
    """
    found = {failure.pod: failure for failure in status.recent_failures}
    for pod in pods:
        is_over = pod.phase == "Failed" and not pod.is_terminating and pod.draining_since is None
        if is_over and pod.role != "canary" and pod.name not in found:
            found[pod.name] = Failure(
                pod=pod.name,
                reason=(pod.reason or "Error")[:_LONGEST_REASON],
                exit_code=pod.exit_code,
                time=pod.ended or pod.created,
                message=" ".join(pod.message.split())[-_LONGEST_MESSAGE:],
            )
    ordered = sorted(found.values(), key=lambda failure: (failure.time, failure.pod))
    return tuple(ordered[-_MOST:])
