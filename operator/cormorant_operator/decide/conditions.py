"""`status.conditions`: the state of a job, and why. Reasons are part of the API.

    Accepted     True: Accepted UnknownFields UnplayedVariants
                 False: InvalidPodTemplate NameConflict Forbidden InvalidSpec
    Scheduled    True: AllPodsScheduled
                 False: Unschedulable QuotaExceeded NamespaceTerminating ImagePull ContainerConfig PodsPending NotWanted
                 ApiServerError VolumeOnLostNode NameNotFreeYet WaitingForQuota
    Ready        True: EnoughWorkers
                 False: HeadNotReady HeadFailed HeadBlocked TooFewWorkers WorkerFailed NotWanted
    Updating     True: TryingImage ReplacingHead RollingUpdate    False: UpToDate
    Progressing  True: FramesCollected EnvironmentsFailing WaitingForConsumer
                 Unknown: ControlPlaneUnreachable TokenRefused CertificateRefused
                 False: NoFrames NotReady Paused Draining NotWanted
    Stalled      True: NoProgress    False: NotStalled
    Paused       True: Spec API NoWorkers    False: NotPaused
    Suspended    True: Suspended    False: Suspending Evicted NotSuspended
    Completed    True: AllFramesDelivered DrainTimedOut
    Failed       True: HeadRefused HeadRestartsExceeded SlotRestartsExceeded StartupDeadlineExceeded Unschedulable
                 Stalled

Completed and Failed exist only when true, and are final.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cormorant_contract.children import tokens_secret
from cormorant_contract.spec import unplayed
from cormorant_contract.status import CollectorJobStatus, Condition, ConditionType
from cormorant_operator.decide import progress
from cormorant_operator.decide.obstacles import acceptance_trouble, scheduling_trouble
from cormorant_operator.decide.outcome import how_it_ended
from cormorant_operator.decide.suspension import State
from cormorant_operator.decide.view import View
from cormorant_operator.job import Fact, find
from cormorant_operator.observed import Pod

_MAX_MESSAGE = 1024
_MAX_UNKNOWN = 5
_TERMINAL = ("Completed", "Failed")
_PAUSES = {
    "Spec": "paused by spec.paused",
    "API": "paused by a client's pause lease; GET /v1/pauses lists the holders",
    "NoWorkers": "no frames are collected: every worker group has 0 replicas",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What this reconcile decided, as far as conditions show it."""

    suspension: State = "no"
    is_replacing_head: bool = False
    is_updating: bool = False
    is_trying_image: bool = False
    is_stalled: bool = False
    outcome: Fact | None = None
    """Completed or Failed."""


def facts(view: View, decision: Decision) -> tuple[Fact, ...]:
    """All conditions, in the order of the table above."""
    is_wanted = decision.suspension in ("no", "draining") and decision.outcome is None
    found = [
        _accepted(view),
        _scheduled(view) if is_wanted else Fact(type="Scheduled", status="False", reason="NotWanted"),
        _ready(view) if is_wanted else Fact(type="Ready", status="False", reason="NotWanted"),
        _updating(decision),
        _progressing(view, decision) if is_wanted else Fact(type="Progressing", status="False", reason="NotWanted"),
        _stalled(view, decision),
        _paused(view),
        _suspended(view, decision),
    ]
    return (*found, decision.outcome) if decision.outcome is not None else tuple(found)


_BLOCKING: tuple[tuple[ConditionType, str], ...] = (
    ("Failed", "True"),
    ("Accepted", "False"),
    ("Scheduled", "False"),
    ("Stalled", "True"),
    ("Ready", "False"),
)
_TRANSIENT = ("PodsPending", "NotWanted", "HeadNotReady", "TooFewWorkers")


def blocking_reason(found: Sequence[Fact]) -> str:
    """Reason of the first condition that keeps the job from collecting well; empty if none does."""
    by_type: dict[ConditionType, Fact] = {fact.type: fact for fact in found}
    for kind, status in _BLOCKING:
        fact = by_type.get(kind)
        if fact is not None and fact.status == status and fact.reason not in _TRANSIENT:
            return fact.reason
    progressing = by_type["Progressing"]
    is_unclear = progressing.status == "Unknown" or progressing.reason in ("WaitingForConsumer", "EnvironmentsFailing")
    return progressing.reason if is_unclear else ""


def merge(status: CollectorJobStatus, news: Sequence[Fact], *, generation: int, now: datetime) -> tuple[Condition, ...]:
    """Conditions with times. Only a change of status is a transition. Completed and Failed are kept."""
    dated = tuple(_dated(status, fact, generation=generation, now=now) for fact in news)
    known = {fact.type for fact in news}
    return (*dated, *(old for old in status.conditions if old.type in _TERMINAL and old.type not in known))


def _dated(status: CollectorJobStatus, fact: Fact, *, generation: int, now: datetime) -> Condition:
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
    trouble = acceptance_trouble(view)
    if trouble is not None:
        return trouble
    if view.job.unknown:
        shown = ", ".join(view.job.unknown[:_MAX_UNKNOWN])
        message = (
            f"this operator does not know {shown}; it ignores these fields and replaces no running pods on template "
            "changes; upgrade the operator"
        )
        return Fact(type="Accepted", status="True", reason="UnknownFields", message=message)
    if sentence := unplayed(view.job.spec):
        return Fact(type="Accepted", status="True", reason="UnplayedVariants", message=sentence)
    return Fact(type="Accepted", status="True", reason="Accepted")


def _scheduled(view: View) -> Fact:
    trouble = scheduling_trouble(view)
    if trouble is not None:
        return trouble
    placed = sum(pod.is_live and pod.is_scheduled for pod in view.examined if pod.role == "worker")
    placed += sum(view.num_counted(group.name) for group in view.groups)
    wanted = sum(view.sizes.values())
    head = view.live_head
    if head is None or not head.is_scheduled or placed < wanted:
        is_head = "is" if head is not None and head.is_scheduled else "is not"
        message = f"{placed} of {wanted} workers are scheduled; the head {is_head} scheduled"
        return Fact(type="Scheduled", status="False", reason="PodsPending", message=message)
    words = _admitted_in_part(view) if view.job.queue is not None else ""
    return Fact(type="Scheduled", status="True", reason="AllPodsScheduled", message=words)


def _admitted_in_part(view: View) -> str:
    less = [
        f"{view.sizes[group.name]} of {wanted} workers of group {group.name}"
        for group in view.groups
        if view.sizes[group.name] < (wanted := view.wanted_size_of(group))
    ]
    return f"Kueue admitted {', '.join(less)}; suspend and resume the job to ask again" if less else ""


def _ready(view: View) -> Fact:
    if view.live_head is None or not view.live_head.is_ready:
        return _head_missing(view)
    ready, wanted = sum(view.ready(group.name) for group in view.groups), sum(view.sizes.values())
    newest = [slot.newest for group in view.groups for slot in view.slots[group.name]]
    failed = [pod for pod in newest if pod is not None and (pod.is_failure or pod.is_blocked or pod.failures)]
    ended = next((pod for pod in failed if pod.is_terminal), None)
    message = f"{ready} of {wanted} workers are ready" + (f"; {how_it_ended(ended)}" if ended is not None else "")
    if not view.has_enough:
        # Waiting for the next attempt, or in it and not ready: the failed predecessor is the reason.
        reason = "WorkerFailed" if any(not pod.is_ready for pod in failed) else "TooFewWorkers"
        return Fact(type="Ready", status="False", reason=reason, message=message)
    return Fact(type="Ready", status="True", reason="EnoughWorkers", message=message)


def _head_missing(view: View) -> Fact:
    """Why there is no ready head, with the end of the last one."""
    ended = next((pod for pod in reversed(view.heads) if pod.is_blocked or pod.is_failure), None)
    if ended is None:
        return Fact(type="Ready", status="False", reason="HeadNotReady", message="the head is not ready yet")
    reason = "HeadBlocked" if ended.is_blocked else "HeadFailed"
    return Fact(type="Ready", status="False", reason=reason, message=how_it_ended(ended))


def _updating(decision: Decision) -> Fact:
    if decision.is_replacing_head:
        return Fact(type="Updating", status="True", reason="ReplacingHead")
    if decision.is_trying_image:
        message = "the head and its workers keep running until the new image has been pulled"
        return Fact(type="Updating", status="True", reason="TryingImage", message=message)
    if decision.is_updating:
        return Fact(type="Updating", status="True", reason="RollingUpdate")
    return Fact(type="Updating", status="False", reason="UpToDate")


def _progressing(view: View, decision: Decision) -> Fact:
    head = view.live_head
    if decision.suspension == "draining":
        return Fact(type="Progressing", status="False", reason="Draining")
    if head is None or not head.is_ready:
        return Fact(type="Progressing", status="False", reason="NotReady", message="the head is not ready yet")
    if view.state.is_silent:
        return _head_silent(view, head)
    if progress.pause_reason(view):
        return Fact(type="Progressing", status="False", reason="Paused")
    if progress.is_all_collected(view):
        message = "all frames are collected; waiting for learners to acknowledge the rest"
        return Fact(type="Progressing", status="False", reason="Draining", message=message)
    if progress.is_waiting_for_consumer(view):
        message = "the queue is full; workers wait for a learner to take a batch"
        return Fact(type="Progressing", status="True", reason="WaitingForConsumer", message=message)
    return _moving(view)


def _head_silent(view: View, head: Pod) -> Fact:
    if view.state.is_token_refused:
        secret = tokens_secret(view.job.name)
        message = (
            f"{head.name} rejects the operator's token: Secret {secret} or the operator's key was changed. The "
            "operator replaces the Secret within five minutes, and the head picks it up without a restart. If this "
            f"lasts, run kubectl delete secret {secret} -n {view.job.namespace}"
        )
        return Fact(type="Progressing", status="Unknown", reason="TokenRefused", message=message)
    if view.state.distrust:
        return Fact(type="Progressing", status="Unknown", reason="CertificateRefused", message=view.state.distrust)
    message = f"{head.name} is ready but does not answer GET /v1/status; the operator leaves the job alone"
    if view.state.is_cut_off:
        message += "; most heads do not answer this operator, so check its network first (egress policy, mTLS, CNI)"
    return Fact(type="Progressing", status="Unknown", reason="ControlPlaneUnreachable", message=message)


def _moving(view: View) -> Fact:
    answer = view.answer
    if answer is None:
        # Not polled yet: keep the previous condition.
        before = find(view.job.status, "Progressing")
        if before is not None:
            return Fact(type="Progressing", status=before.status, reason=before.reason, message=before.message)
    if progress.is_moving(view) and answer is not None and answer.env_failures:
        return Fact(type="Progressing", status="True", reason="EnvironmentsFailing", message=answer.env_failures)
    if progress.is_moving(view):
        return Fact(type="Progressing", status="True", reason="FramesCollected")
    message = answer.failure if answer is not None else ""
    return Fact(type="Progressing", status="False", reason="NoFrames", message=message)


def _stalled(view: View, decision: Decision) -> Fact:
    if decision.is_stalled:
        seconds = view.policy.progress_deadline_seconds
        message = f"no frames were collected within progressDeadlineSeconds ({seconds})"
        return Fact(type="Stalled", status="True", reason="NoProgress", message=message)
    return Fact(type="Stalled", status="False", reason="NotStalled")


def _paused(view: View) -> Fact:
    reason = progress.pause_reason(view)
    if not reason and view.answer is None and not view.job.spec.paused:
        # A silent head may still be paused by a lease: keep the previous condition.
        before = find(view.job.status, "Paused")
        if before is not None and before.reason == "API" and view.live_head is not None:
            return Fact(type="Paused", status=before.status, reason=before.reason, message=before.message)
    if reason:
        return Fact(type="Paused", status="True", reason=reason, message=_PAUSES[reason])
    return Fact(type="Paused", status="False", reason="NotPaused")


def _suspended(view: View, decision: Decision) -> Fact:
    if decision.suspension == "suspended":
        return Fact(type="Suspended", status="True", reason="Suspended")
    if decision.suspension == "no":
        return Fact(type="Suspended", status="False", reason="NotSuspended")
    if view.eviction and not view.job.spec.suspend:
        return Fact(type="Suspended", status="False", reason="Evicted", message=f"Kueue: {view.eviction}")
    return Fact(type="Suspended", status="False", reason="Suspending")
