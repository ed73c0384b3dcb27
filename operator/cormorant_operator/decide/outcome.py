"""Decides whether and how a job ends, and what is cleaned up. Every waiting state has a deadline."""

from collections.abc import Iterator
from datetime import datetime
from functools import partial

from cormorant_operator.decide import progress
from cormorant_operator.decide.backoff import failures_after
from cormorant_operator.decide.obstacles import acceptance_trouble, is_late, late_at, scheduling_trouble
from cormorant_operator.decide.plan import Action, DeleteJob, DeletePod, Plan
from cormorant_operator.decide.view import View
from cormorant_operator.job import Fact
from cormorant_operator.observed import EXIT_REFUSED, Pod

_COMPLETED = partial(Fact, type="Completed", status="True")
_FAILED = partial(Fact, type="Failed", status="True")


def find_outcome(view: View) -> Fact | None:
    return next(_outcomes(view), None)


def outcome_dues(view: View) -> Iterator[datetime]:
    """When a deadline may end the job or find it stalled."""
    for deadline in (
        progress.stall_deadline(view),
        progress.startup_deadline(view),
        progress.drain_deadline(view),
    ):
        if deadline is not None:
            # A passed deadline that is not confirmed yet waits for the head's next answer.
            yield deadline.at if deadline.at > view.now else view.after(view.now, view.defaults.poll_s)
    if view.policy.on_unschedulable != "Wait":
        for pod in view.examined:
            if (at := late_at(view, pod)) is not None and at > view.now:
                yield at


def _outcomes(view: View) -> Iterator[Fact]:
    yield from _completions(view)
    yield from _head_failures(view)
    yield from _slot_failures(view)
    # A suspended or suspending job has no deadlines.
    if not view.is_stopping:
        yield from _missed_deadlines(view)


def _completions(view: View) -> Iterator[Fact]:
    frames = progress.frames_collected(view)
    if any(head.phase == "Succeeded" for head in view.heads):
        yield _COMPLETED(reason="AllFramesDelivered", message=f"{frames} frames were collected and delivered")
    drained = progress.drain_deadline(view)
    if drained is not None and drained.is_over:
        yield _COMPLETED(
            reason="DrainTimedOut",
            message=f"{frames} frames were collected; learners did not acknowledge all of them within drainSeconds "
            f"({view.policy.drain_seconds})",
        )


def _head_failures(view: View) -> Iterator[Fact]:
    head = view.newest_head
    if head is None or not head.is_failure:
        return
    if head.exit_code == EXIT_REFUSED:
        words = head.message or "it left no termination message; see its log"
        yield _FAILED(reason="HeadRefused", message=f"{head.name} rejected its configuration: {words}"[-1024:])
    failures, limit = failures_after(head), view.policy.max_head_restarts
    if failures > limit:
        yield _FAILED(
            reason="HeadRestartsExceeded",
            message=f"the head failed {failures} times in a row (maxHeadRestarts {limit}); {how_it_ended(head)}",
        )


def _slot_failures(view: View) -> Iterator[Fact]:
    limit = view.policy.max_restarts_per_slot
    for group in view.groups:
        template = view.templates.worker(group)
        for slot in view.slots[group.name]:
            newest = slot.newest
            if newest is None or slot.index >= view.sizes[group.name] or not newest.is_failure:
                continue
            if (failures := slot.failures(template)) > limit:
                yield _FAILED(
                    reason="SlotRestartsExceeded",
                    message=f"worker {group.name}-{slot.index} failed {failures} times in a row "
                    f"(maxRestartsPerSlot {limit}); {how_it_ended(newest)}",
                )


def _missed_deadlines(view: View) -> Iterator[Fact]:
    policy = view.policy
    started, stalled = progress.startup_deadline(view), progress.stall_deadline(view)
    if started is not None and started.is_over:
        trouble = acceptance_trouble(view) or scheduling_trouble(view)
        words = f": {trouble.message}" if trouble is not None else "; see the events of its pods"
        what = "the job did not become ready again" if progress.has_collected(view) else "no frames were collected"
        yield _FAILED(
            reason="StartupDeadlineExceeded",
            message=f"{what} within startupDeadlineSeconds ({policy.startup_deadline_seconds}){words}",
        )
    late = [pod for pod in view.examined if is_late(view, pod)]
    if policy.on_unschedulable == "Fail" and late:
        yield _FAILED(
            reason="Unschedulable",
            message=f"{late[0].name} was not scheduled within unschedulableAfterSeconds "
            f"({policy.unschedulable_after_seconds}): {late[0].obstacle_message}",
        )
    if policy.on_stall == "Fail" and stalled is not None and stalled.is_over:
        yield _FAILED(
            reason="Stalled",
            message=f"no frames were collected within progressDeadlineSeconds ({policy.progress_deadline_seconds})",
        )


def how_it_ended(pod: Pod) -> str:
    """One sentence on how a pod ended, with its termination message."""
    ended = f"exited with code {pod.exit_code}" if pod.exit_code is not None else "ended"
    said = " ".join(pod.message.split())
    words = f": {said[-300:]}" if said else ""
    return f"{pod.name} {ended} ({pod.reason or pod.phase}){words}"


def clean_up(view: View) -> Plan:
    """The plan for a job whose end is in its status. Nothing is created for it again."""
    status, policy = view.job.status, view.policy
    finished, ttl_s = status.completion_time, policy.ttl_seconds_after_finished
    over = view.after(finished, ttl_s) if finished is not None and ttl_s is not None else None
    if over is not None and view.now >= over:
        return Plan(actions=(DeleteJob(),))
    actions: list[Action] = []
    for pod in view.pods:
        if pod.is_terminating or policy.clean_pod_policy == "None":
            continue
        # Keep an ended head for its log; delete one that still occupies a node.
        if pod.role != "head" or policy.clean_pod_policy == "All" or not pod.is_terminal or pod.has_sidecar:
            actions.append(DeletePod(pod=pod, why="the job has ended"))
    return Plan(actions=tuple(actions), due=over)
