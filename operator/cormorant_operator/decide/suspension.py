"""Suspends a job, by its spec or because Kueue evicted it: drains the head, then deletes all pods.

    running -> draining (workers finish, learners take the rest, at most drainSeconds) -> deleting -> Suspended

A drain is never cancelled: a job that is resumed meanwhile continues with a new head.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from cormorant_operator import names
from cormorant_operator.decide.plan import Action, CheckNode, DeletePod, DrainHead, MarkPod
from cormorant_operator.decide.view import View
from cormorant_operator.decide.workers import live_workers

State = Literal["no", "draining", "deleting", "suspended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    state: State
    actions: tuple[Action, ...] = ()
    due: datetime | None = None


def plan_suspension(view: View) -> Suspension:
    head = view.live_head
    is_wanted, why = view.is_stopping, _why(view)
    if head is None:
        if not is_wanted:
            return Suspension(state="no")
        going = (*live_workers(view), *(pod for pod in view.canaries if not pod.is_terminating))
        orders = tuple(DeletePod(pod=pod, why=why) for pod in going)
        remains = tuple(DeletePod(pod=pod, why=why) for pod in view.heads if not pod.is_terminating)
        nodes, due = view.nodes_to_check(view.pods)
        looks = tuple(CheckNode(name=name) for name in nodes)
        state: State = "deleting" if view.has_pods else "suspended"
        return Suspension(state=state, actions=(*orders, *remains, *looks), due=due)
    if head.draining_since is None and not is_wanted:
        return Suspension(state="no")
    if head.draining_since is None and not head.is_ready:
        # It holds nothing to drain. A head that is already draining keeps its time, whatever its probe says.
        return Suspension(state="deleting", actions=_delete_all(view))
    if head.draining_since is None:
        mark = MarkPod(pod=head, annotation=names.DRAINING, at=view.now)
        return Suspension(state="draining", actions=(mark, DrainHead(pod=head)))
    until = view.after(head.draining_since, view.policy.drain_seconds)
    if view.now >= until:
        return Suspension(state="deleting", actions=_delete_all(view))
    is_told = view.answer is None or view.answer.phase in ("Draining", "Completed")
    return Suspension(state="draining", actions=() if is_told else (DrainHead(pod=head),), due=until)


def _why(view: View) -> str:
    return "the job is suspended" if view.job.spec.suspend else "Kueue evicted the job"


def _delete_all(view: View) -> tuple[Action, ...]:
    why = _why(view)
    orders = [DeletePod(pod=pod, why=why) for pod in view.heads if not pod.is_terminating]
    if view.is_stopping:
        orders += [DeletePod(pod=pod, why=why) for pod in live_workers(view)]
    return tuple(orders)
