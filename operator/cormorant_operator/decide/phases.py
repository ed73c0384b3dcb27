"""`status.phase`: a one-word summary for people. No decision uses it."""

from cormorant_contract.status import Phase
from cormorant_operator.decide import progress
from cormorant_operator.decide.conditions import Decision
from cormorant_operator.decide.view import View


def phase_of(view: View, decision: Decision) -> Phase:
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
    is_placed = any(pod.is_live and pod.is_scheduled for pod in view.observed.pods)
    return "Starting" if is_placed else "Pending"
