"""The status after a reconcile: conditions, counters and phase; whether to write it now, and which Events tell of it.

`status.conditions` are the job's state and its reasons. Reasons are part of the API.

    Accepted     True: Accepted UnknownFields
                 False: InvalidPodTemplate NameConflict Forbidden InvalidSpec
    Scheduled    True: AllPodsScheduled
                 False: Unschedulable QuotaExceeded NamespaceTerminating ImagePull ContainerConfig PodsPending NotWanted
                 ApiServerError VolumeOnLostNode NameNotFreeYet WaitingForQuota
    Ready        True: EnoughWorkers
                 False: HeadNotReady HeadFailed HeadBlocked TooFewWorkers WorkerFailed NotWanted
    Progressing  True: FramesCollected EnvironmentsFailing WeightsMissing WaitingForConsumer
                 Unknown: ControlPlaneUnreachable TokenRefused
                 False: NoFrames NotReady Paused Draining NotWanted
    Updating     True: TryingImage ReplacingHead RollingUpdate    False: UpToDate
    Stalled      True: NoProgress    False: NotStalled
    Paused       True: Spec API NoWorkers    False: NotPaused
    Suspended    True: Suspended    False: Suspending Evicted NotSuspended
    Completed    True: AllFramesDelivered DrainTimedOut
    Failed       True: HeadRefused HeadRestartsExceeded SlotRestartsExceeded StartupDeadlineExceeded Unschedulable
                 Stalled

Completed and Failed exist only when true, and are final.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cormorant_contract.children import GROUP, JOB_UID, tokens_secret
from cormorant_contract.job import API_VERSION, KIND
from cormorant_contract.status import (
    CollectorJobStatus,
    Condition,
    ConditionType,
    ElasticStatus,
    Failure,
    GroupStatus,
    Phase,
)
from cormorant_operator import names
from cormorant_operator.decide import progress
from cormorant_operator.decide.obstacles import acceptance_trouble, scheduling_trouble
from cormorant_operator.decide.plan import Draft, JobEvent
from cormorant_operator.decide.progress import how_it_ended
from cormorant_operator.decide.view import View
from cormorant_operator.job import Fact, Identity, Unreadable, find
from cormorant_operator.pods import Pod

_COUNTERS = ("frames", "weights")
_MAX_FAILURES = 10
_MAX_REASON = 128
_MAX_FAILURE_MESSAGE = 512
_MAX_MESSAGE = 1024
_PAUSES = {
    "Spec": "paused by spec.paused",
    "API": "paused by a client's pause lease; GET /v1/pauses lists the holders",
    "NoWorkers": "no frames are collected: every worker group has 0 replicas",
}


def make_status(view: View, draft: Draft) -> CollectorJobStatus:
    before, elastic = view.job.status, view.job.spec.elastic.name
    restarts = {group.name: group.restarts for group in before.groups}
    groups = tuple(
        GroupStatus(
            name=group.name,
            desired=view.sizes[group.name],
            ready=view.ready(group.name),
            restarts=max(restarts.get(group.name, 0), view.restarts(group.name)),
        )
        for group in view.groups
    )
    generation = view.job.generation
    facts = tuple(_facts(view, draft))
    # Those in the status and the current ones, each once, the newest last.
    failures = {failure.pod: failure for failure in before.recent_failures}
    for pod in view.examined:
        is_over = pod.phase == "Failed" and not pod.is_terminating and pod.draining_since is None
        if is_over and pod.role != "canary" and pod.name not in failures:
            failures[pod.name] = Failure(
                pod=pod.name,
                reason=(pod.reason or "Error")[:_MAX_REASON],
                exit_code=pod.exit_code,
                time=pod.ended or pod.created,
                message=" ".join(pod.message.split())[-_MAX_FAILURE_MESSAGE:],
            )
    newest = sorted(failures.values(), key=lambda failure: (failure.time, failure.pod))[-_MAX_FAILURES:]
    return CollectorJobStatus(
        observed_generation=generation,
        phase=_phase(view, draft),
        reason=_blocking_reason(facts),
        # Not the epoch of a head whose creation failed or is unconfirmed: the next attempt finds out.
        epoch=view.epoch,
        head_restarts=draft.head_restarts,
        start_time=None if draft.suspension == "suspended" else before.start_time or view.now,
        completion_time=None if draft.outcome is None else before.completion_time or view.now,
        workers=f"{sum(group.ready for group in groups)}/{sum(group.desired for group in groups)}",
        frames=progress.frames_status(view),
        weights=progress.weights_status(view),
        groups=groups,
        elastic=ElasticStatus(
            replicas=view.num_counted(elastic) + sum(pod.is_live for pod in view.examined_workers[elastic]),
            selector=f"{JOB_UID}={view.job.uid},{GROUP}={elastic}",
        ),
        conditions=tuple(_dated(before, fact, generation=generation, now=view.now) for fact in facts),
        recent_failures=tuple(newest),
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
    refused = Fact("Accepted", "False", "InvalidSpec", job.message)
    accepted = _dated(job.status, refused, generation=job.generation, now=now)
    others = tuple(condition for condition in job.status.conditions if condition.type != "Accepted")
    after = job.status.model_copy(update={"conditions": (accepted, *others)})
    return None if after == job.status else after


def _phase(view: View, draft: Draft) -> Phase:
    """A one-word summary for people. No decision uses it."""
    if draft.outcome is not None:
        return "Completed" if draft.outcome.type == "Completed" else "Failed"
    if draft.suspension != "no":
        return "Suspended" if draft.suspension == "suspended" else "Suspending"
    head = view.live_head
    if progress.is_all_collected(view) and head is not None:
        return "Completing"
    if head is None or not head.is_ready:
        is_placed = any(pod.is_live and pod.is_scheduled for pod in view.record.pods)
        if not view.may_create and not view.has_pods:
            return "Pending"
        return "Restarting" if view.epoch > 1 else "Starting" if is_placed else "Pending"
    if progress.pause_reason(view):
        return "Paused"
    if not view.has_enough:
        return "Starting" if view.job.status.frames.last_progress_time is None else "Degraded"
    is_whole = all(view.ready(group.name) >= view.sizes[group.name] for group in view.groups)
    return "Running" if is_whole else "Degraded"


# -- conditions ------------------------------------------------------------------------------------------------


_OF_PODS: tuple[ConditionType, ...] = ("Scheduled", "Ready", "Progressing")


def _facts(view: View, draft: Draft) -> Iterator[Fact]:
    """All conditions, in the order of the table above."""
    yield acceptance_trouble(view) or _accepted(view)
    if draft.suspension in ("no", "draining") and draft.outcome is None:
        yield from (scheduling_trouble(view) or _scheduled(view), _ready(view), _progressing(view, draft))
    else:
        yield from (Fact(kind, "False", "NotWanted") for kind in _OF_PODS)
    words = "the head and its workers keep running until the new image has been pulled"
    is_updating, is_trying = draft.updating != "UpToDate", draft.updating == "TryingImage"
    yield Fact("Updating", "True" if is_updating else "False", draft.updating, words if is_trying else "")
    if draft.is_stalled:
        yield Fact("Stalled", "True", "NoProgress", progress.no_progress(view))
    else:
        yield Fact("Stalled", "False", "NotStalled")
    yield from (_paused(view), _suspended(view, draft))
    if draft.outcome is not None:
        yield draft.outcome


_BLOCKING: Mapping[ConditionType, str] = {
    "Failed": "True",
    "Accepted": "False",
    "Scheduled": "False",
    "Stalled": "True",
    "Ready": "False",
    "Progressing": "Unknown",
}
"""Statuses that keep a job from collecting, the first cause first."""
_NOTABLE = ("WaitingForConsumer", "EnvironmentsFailing", "WeightsMissing")
_TRANSIENT = ("PodsPending", "NotWanted", "HeadNotReady", "TooFewWorkers")


def _is_trouble(fact: Fact | Condition) -> bool:
    """Whether a condition keeps the job from collecting well."""
    is_blocking = _BLOCKING.get(fact.type) == fact.status and fact.reason not in _TRANSIENT
    return is_blocking or fact.reason in _NOTABLE


def _blocking_reason(found: Sequence[Fact]) -> str:
    """Reason of the first condition that keeps the job from collecting well; empty if none does."""
    reasons: dict[ConditionType, str] = {fact.type: fact.reason for fact in found if _is_trouble(fact)}
    return next((reasons[kind] for kind in _BLOCKING if kind in reasons), "")


def _dated(status: CollectorJobStatus, fact: Fact, *, generation: int, now: datetime) -> Condition:
    """A condition with its times. Only a change of status is a transition."""
    before = find(status, fact.type)
    is_same = before is not None and before.status == fact.status
    return Condition(
        type=fact.type,
        status=fact.status,
        observed_generation=generation,
        last_transition_time=before.last_transition_time if before is not None and is_same else now,
        reason=fact.reason,
        message=fact.message[:_MAX_MESSAGE],
    )


def _accepted(view: View) -> Fact:
    if view.job.unknown:
        message = (
            f"this operator does not know {', '.join(view.job.unknown)}; it ignores these fields and replaces no pods "
            "on template changes; upgrade the operator"
        )
        return Fact("Accepted", "True", "UnknownFields", message)
    return Fact("Accepted", "True", "Accepted")


def _scheduled(view: View) -> Fact:
    placed = sum(pod.is_live and pod.is_scheduled for pod in view.examined if pod.role == "worker")
    placed += sum(view.num_counted(group.name) for group in view.groups)
    wanted = sum(view.sizes.values())
    head = view.live_head
    if head is None or not head.is_scheduled or placed < wanted:
        is_head = "is" if head is not None and head.is_scheduled else "is not"
        message = f"{placed} of {wanted} workers are scheduled; the head {is_head} scheduled"
        return Fact("Scheduled", "False", "PodsPending", message)
    less = [
        f"{view.sizes[group.name]} of {wanted} workers of group {group.name}"
        for group in view.groups
        if view.job.queue and view.sizes[group.name] < (wanted := view.wanted_size_of(group))
    ]
    words = f"Kueue admitted {', '.join(less)}; suspend and resume the job to ask again" if less else ""
    return Fact("Scheduled", "True", "AllPodsScheduled", words)


def _ready(view: View) -> Fact:
    if view.live_head is None or not view.live_head.is_ready:
        # The message includes how the last head ended.
        head = next((pod for pod in reversed(view.heads) if pod.is_blocked or pod.is_failure), None)
        if head is None:
            return Fact("Ready", "False", "HeadNotReady", "the head is not ready yet")
        reason = "HeadBlocked" if head.is_blocked else "HeadFailed"
        return Fact("Ready", "False", reason, how_it_ended(head))
    ready, wanted = sum(view.ready(group.name) for group in view.groups), sum(view.sizes.values())
    newest = [slot.newest for group in view.groups for slot in view.slots[group.name]]
    failed = [pod for pod in newest if pod is not None and (pod.is_failure or pod.is_blocked or pod.failures)]
    ended = next((pod for pod in failed if pod.is_terminal), None)
    message = f"{ready} of {wanted} workers are ready" + (f"; {how_it_ended(ended)}" if ended is not None else "")
    if view.has_enough:
        return Fact("Ready", "True", "EnoughWorkers", message)
    # The next attempt is delayed or not ready: the failed predecessor is the reason.
    reason = "WorkerFailed" if any(not pod.is_ready for pod in failed) else "TooFewWorkers"
    return Fact("Ready", "False", reason, message)


def _progressing(view: View, draft: Draft) -> Fact:
    head, answer, before = view.live_head, view.answer, find(view.job.status, "Progressing")
    if draft.suspension == "draining":
        return Fact("Progressing", "False", "Draining")
    if head is None or not head.is_ready:
        return Fact("Progressing", "False", "NotReady", "the head is not ready yet")
    if view.state.is_silent:
        return _head_silent(view, head)
    if progress.pause_reason(view):
        return Fact("Progressing", "False", "Paused")
    if progress.is_all_collected(view):
        words = "all frames are collected; waiting for learners to acknowledge the rest"
        return Fact("Progressing", "False", "Draining", words)
    if answer is not None and answer.is_queue_full:
        words = "the queue is full; workers wait for a learner to take a batch"
        return Fact("Progressing", "True", "WaitingForConsumer", words)
    if answer is None and before is not None:
        # The head was not polled yet.
        return _as_before(before)
    until, troubles = progress.moving_until(view), answer.troubles if answer is not None else {}
    if until is None or view.now >= until:
        return Fact("Progressing", "False", "NoFrames", troubles.get("Failed", ""))
    for reason in ("EnvironmentsFailing", "WeightsMissing"):
        if reason in troubles:
            return Fact("Progressing", "True", reason, troubles[reason])
    return Fact("Progressing", "True", "FramesCollected")


def _head_silent(view: View, head: Pod) -> Fact:
    if view.state.is_token_refused:
        secret = tokens_secret(view.job.name)
        message = (
            f"{head.name} rejects the operator's token: Secret {secret} or the operator's key was changed. The "
            "operator replaces the Secret within five minutes, and the head picks it up without a restart. If this "
            f"lasts, run kubectl delete secret {secret} -n {view.job.namespace}"
        )
        return Fact("Progressing", "Unknown", "TokenRefused", message)
    message = f"the operator leaves the job alone until {head.name} answers: {view.state.silence}"
    return Fact("Progressing", "Unknown", "ControlPlaneUnreachable", message)


def _as_before(condition: Condition) -> Fact:
    return Fact(condition.type, condition.status, condition.reason, condition.message)


def _paused(view: View) -> Fact:
    reason, answer, before = progress.pause_reason(view), view.answer, find(view.job.status, "Paused")
    if reason:
        words = answer.troubles.get("WeightsMissing", "") if answer is not None and reason == "API" else ""
        return Fact("Paused", "True", reason, words or _PAUSES[reason])
    if answer is None and before is not None and before.reason == "API" and view.live_head is not None:
        # A silent head may still be paused by a lease: keep the previous condition.
        return _as_before(before)
    return Fact("Paused", "False", "NotPaused")


def _suspended(view: View, draft: Draft) -> Fact:
    if draft.suspension == "suspended":
        return Fact("Suspended", "True", "Suspended")
    if draft.suspension == "no":
        return Fact("Suspended", "False", "NotSuspended")
    if view.eviction and not view.job.spec.suspend:
        return Fact("Suspended", "False", "Evicted", f"Kueue: {view.eviction}")
    return Fact("Suspended", "False", "Suspending")


# -- events ----------------------------------------------------------------------------------------------------

_GOOD_NEWS = ("Ready", "Paused", "Suspended", "Completed", "Updating")
_SAID = ("Evicted", "UnknownFields")
_QUIET = ("NamespaceTerminating", "NameNotFreeYet", "HeadFailed", "WorkerFailed", "WaitingForConsumer")
"""Troubles without an event of their own: they pass soon, or are ordinary, or an event names the pod."""


def events_between(before: CollectorJobStatus, after: CollectorJobStatus) -> Iterator[JobEvent]:
    if after.epoch > before.epoch:
        yield JobEvent(reason="HeadCreated", message=f"created the head of epoch {after.epoch}")
    sizes = {group.name: group.desired for group in before.groups}
    for group in after.groups:
        if (size := sizes.get(group.name, group.desired)) != group.desired:
            yield JobEvent(reason="Scaled", message=f"group {group.name}: from {size} to {group.desired} workers")
    known = {failure.pod for failure in before.recent_failures}
    for failure in after.recent_failures:
        if failure.pod not in known:
            code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
            words = f": {failure.message}" if failure.message else ""
            yield JobEvent(reason="PodFailed", message=f"{failure.pod}: {failure.reason}{code}{words}", is_warning=True)
    for condition in after.conditions:
        old = find(before, condition.type)
        is_same = old is not None and (old.status, old.reason) == (condition.status, condition.reason)
        is_good = condition.status == "True" and condition.type in _GOOD_NEWS
        is_trouble = (_is_trouble(condition) and condition.reason not in _QUIET) or condition.reason in _SAID
        if (is_good or is_trouble) and not is_same:
            yield JobEvent(
                # "Spec" or "API" alone would not say what happened.
                reason="Paused" if condition.type == "Paused" else condition.reason,
                message=condition.message or f"{condition.type} is {condition.status}",
                is_warning=is_trouble and condition.reason not in ("WaitingForQuota", "Evicted"),
            )


def event(job: Identity, note: JobEvent, *, at: datetime) -> dict[str, Any]:
    """An Event as JSON. Two operators that report the same in the same second create the same Event."""
    time = at.replace(microsecond=0).isoformat().replace("+00:00", "Z")
    key = names.digest(job.uid, note.reason, note.message, time)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{key}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "reason": note.reason,
        "message": note.message[:_MAX_MESSAGE],
        "type": "Warning" if note.is_warning else "Normal",
        "source": {"component": names.MANAGER},
        "reportingComponent": names.MANAGER,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
