"""The status after a reconcile, and whether it is worth a write."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from cormorant_contract.status import CollectorJobStatus, Condition, ElasticStatus, Failure, GroupStatus, Phase
from cormorant_operator import names
from cormorant_operator.decide import progress
from cormorant_operator.decide.conditions import Decision, blocking_reason, facts, merge
from cormorant_operator.decide.view import View
from cormorant_operator.job import Unreadable, find
from cormorant_operator.observed import Pod

_COUNTERS = ("frames", "weights")


def make_status(view: View, decision: Decision, *, epoch: int, head_restarts: int) -> CollectorJobStatus:
    """The whole status. `epoch` is that of the live head, or of the one created now."""
    before, spec = view.job.status, view.job.spec
    groups = tuple(_group(view, group.name) for group in view.groups)
    elastic = spec.elastic.name
    generation = view.job.identity.generation
    is_ended = decision.outcome is not None
    found = facts(view, decision)
    return CollectorJobStatus(
        observed_generation=generation,
        phase=_phase(view, decision),
        reason=blocking_reason(found),
        epoch=max(before.epoch, epoch),
        head_restarts=head_restarts,
        start_time=_start_time(view, decision),
        completion_time=(before.completion_time or view.now) if is_ended else None,
        workers=f"{sum(group.ready for group in groups)}/{sum(group.desired for group in groups)}",
        frames=progress.frames_status(view, epoch=epoch),
        weights=progress.weights_status(view),
        groups=groups,
        elastic=ElasticStatus(
            replicas=view.num_counted(elastic) + sum(pod.is_live for pod in view.examined_workers[elastic]),
            selector=names.worker_selector(view.job.uid, group=elastic),
        ),
        conditions=merge(before, found, generation=generation, now=view.now),
        recent_failures=recent_failures(before, view.examined),
    )


def write_at(
    before: CollectorJobStatus, after: CollectorJobStatus, *, now: datetime, interval_s: float
) -> datetime | None:
    """When to write a status: now, or later if only counters changed and were written recently. None: unchanged."""
    if before == after:
        return None
    last = before.frames.last_progress_time
    is_moving = after.frames.collected > before.frames.collected
    if not is_moving or last is None or not is_counters_only(before, after):
        return now
    return max(now, last + timedelta(seconds=interval_s))


def is_counters_only(before: CollectorJobStatus, after: CollectorJobStatus) -> bool:
    """Whether two statuses differ in counters only."""
    counters = {name: getattr(before, name) for name in _COUNTERS}
    return after.model_copy(update=counters) == before


def refused_status(job: Unreadable, now: datetime) -> CollectorJobStatus | None:
    """The status of a job that cannot be parsed: only the condition Accepted changes. None: unchanged."""
    if job.status is None:
        return None
    before = find(job.status, "Accepted")
    is_same = before is not None and before.status == "False"
    accepted = Condition(
        type="Accepted",
        status="False",
        observed_generation=job.identity.generation,
        last_transition_time=before.last_transition_time if before is not None and is_same else now,
        reason="InvalidSpec",
        message=job.message[:1024],
    )
    others = tuple(condition for condition in job.status.conditions if condition.type != "Accepted")
    after = job.status.model_copy(update={"conditions": (accepted, *others)})
    return None if after == job.status else after


def _phase(view: View, decision: Decision) -> Phase:
    """A one-word summary for people. No decision uses it."""
    if decision.outcome is not None:
        return "Completed" if decision.outcome.type == "Completed" else "Failed"
    if decision.suspension != "no":
        return "Suspended" if decision.suspension == "suspended" else "Suspending"
    head = view.live_head
    if progress.is_all_collected(view) and head is not None:
        return "Completing"
    if head is None or not head.is_ready:
        return _beginning(view)
    if progress.pause_reason(view):
        return "Paused"
    if not view.has_enough:
        return "Starting" if view.job.status.frames.last_progress_time is None else "Degraded"
    is_whole = all(view.ready(group.name) >= view.sizes[group.name] for group in view.groups)
    return "Running" if is_whole else "Degraded"


def _beginning(view: View) -> Phase:
    if not view.may_create and not view.has_pods:
        return "Pending"
    if view.epoch > 1:
        return "Restarting"
    is_placed = any(pod.is_live and pod.is_scheduled for pod in view.pods)
    return "Starting" if is_placed else "Pending"


def _group(view: View, name: str) -> GroupStatus:
    before = next((group.restarts for group in view.job.status.groups if group.name == name), 0)
    restarts = max(before, view.restarts(name))
    return GroupStatus(name=name, desired=view.sizes[name], ready=view.ready(name), restarts=restarts)


def _start_time(view: View, decision: Decision) -> datetime | None:
    before = view.job.status.start_time
    if decision.suspension == "suspended":
        return None
    return before if before is not None else view.now


_MAX_FAILURES = 10
_MAX_REASON = 128
_MAX_MESSAGE = 512


def recent_failures(status: CollectorJobStatus, pods: Iterable[Pod]) -> tuple[Failure, ...]:
    """`status.recentFailures`: those in the status and the current ones, each once, the newest last."""
    found = {failure.pod: failure for failure in status.recent_failures}
    for pod in pods:
        is_over = pod.phase == "Failed" and not pod.is_terminating and pod.draining_since is None
        if is_over and pod.role != "canary" and pod.name not in found:
            found[pod.name] = Failure(
                pod=pod.name,
                reason=(pod.reason or "Error")[:_MAX_REASON],
                exit_code=pod.exit_code,
                time=pod.ended or pod.created,
                message=" ".join(pod.message.split())[-_MAX_MESSAGE:],
            )
    ordered = sorted(found.values(), key=lambda failure: (failure.time, failure.pod))
    return tuple(ordered[-_MAX_FAILURES:])
