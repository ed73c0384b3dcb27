"""Decides about workers: fills empty slots, rolls outdated pods, scales down."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from cormorant_contract.workers import WorkerGroup
from cormorant_operator import names
from cormorant_operator.decide.plan import Action, CreatePod, DeletePod, MarkPod
from cormorant_operator.decide.slots import Slot
from cormorant_operator.decide.view import View
from cormorant_operator.names import Manifest
from cormorant_operator.observed import Pod
from cormorant_operator.render.pods import PodOrigin, worker_pod


@dataclass(slots=True, kw_only=True)
class WorkerPlan:
    """Decisions about the workers, filled group by group."""

    creates_left: int
    may_go: int
    """Ready workers that may be replaced now."""
    actions: list[Action] = field(default_factory=list)
    dues: list[datetime] = field(default_factory=list)
    outdated: list[Pod] = field(default_factory=list)
    """Ready workers of the current group with an outdated template; replaced a few at a time."""
    is_updating: bool = False
    """An outdated pod will be replaced."""
    is_waiting_for_head: bool = False
    """A surplus worker is finishing its batch."""


def plan_workers(view: View, *, may_create: bool, may_update: bool = True) -> WorkerPlan:
    """Decide about every worker pod. `may_create`: a head exists or is about to."""
    slots = view.slots
    missing = sum(
        slot.live is None or not slot.live.is_ready
        for name, found in slots.items()
        for slot in found
        if slot.index < view.sizes[name]
    )
    may_go = view.policy.unavailable_of(sum(view.sizes.values())) - missing
    plan = WorkerPlan(creates_left=view.defaults.max_creates, may_go=max(0, may_go))
    for group in view.groups:
        for slot in slots[group.name]:
            if slot.index < view.sizes[group.name]:
                _keep(view, plan, group, slot, may_create=may_create, may_update=may_update)
            else:
                _scale_down(view, plan, group, slot)
        if may_update:
            _roll(view, plan, group)
    for name, pods in view.examined_workers.items():
        if name not in view.sizes:
            plan.actions += [DeletePod(pod=pod, why="its group was removed") for pod in pods if not pod.is_terminating]
    return plan


def _keep(view: View, plan: WorkerPlan, group: WorkerGroup, slot: Slot, *, may_create: bool, may_update: bool) -> None:
    template = view.templates.worker(group)
    plan.actions += [DeletePod(pod=pod, why="a newer attempt fills its slot") for pod in slot.superseded]
    over, until = slot.leftovers(view.now)
    plan.actions += [DeletePod(pod=pod, why="its successor is running") for pod in over]
    plan.dues += [until] if until is not None else []
    if slot.live is not None:
        if slot.live.retiring_since is not None:
            plan.actions.append(MarkPod(pod=slot.live, annotation=names.RETIRING, at=None))
        if may_update:
            _update(view, plan, group, slot.live)
    elif may_create and view.is_proven(template):
        _fill(view, plan, group, slot)


def _fill(view: View, plan: WorkerPlan, group: WorkerGroup, slot: Slot) -> None:
    template = view.templates.worker(group)
    vacancy = slot.vacancy(template)
    waits = [at for at in (vacancy.not_before, view.refused_until(group.name)) if at is not None and at > view.now]
    if waits:
        plan.dues.append(max(waits))
    elif plan.creates_left == 0:
        plan.dues.append(view.now)
    else:
        plan.creates_left -= 1
        origin = PodOrigin(
            template=template,
            base_image=view.base_image,
            cuda_image=view.cuda_image,
            failures=vacancy.failures,
            restarts=vacancy.restarts,
            placement=view.placement(group.name),
        )
        manifest = worker_pod(view.job, view.defaults, origin, group=group, index=slot.index, attempt=vacancy.attempt)
        plan.actions.append(CreatePod(owner=group.name, manifest=manifest))


def render_worker(view: View, group: WorkerGroup) -> Manifest:
    """A worker of a group as the manifest has it now."""
    image = view.job.spec.image
    origin = PodOrigin(
        template=view.templates.worker(group),
        base_image=image or view.base_image,
        cuda_image="" if image else view.cuda_image,
    )
    return worker_pod(view.job, view.defaults, origin, group=group, index=0, attempt=0)


def _update(view: View, plan: WorkerPlan, group: WorkerGroup, pod: Pod) -> None:
    template = view.templates.worker(group)
    # Ray and Python must match in all pods of a Ray cluster: a worker with another image cannot join.
    is_foreign = pod.base_image != view.base_image
    is_current = pod.template == template or bool(view.job.unknown)
    if (is_current and not is_foreign) or not view.is_proven(template):
        return
    plan.is_updating = True
    if not is_foreign and pod.is_ready:
        plan.outdated.append(pod)
    else:
        plan.actions.append(DeletePod(pod=pod, why="its template changed"))


def _roll(view: View, plan: WorkerPlan, group: WorkerGroup) -> None:
    """Replace ready workers of an earlier template, as many as may go, the lowest places first."""
    template = view.templates.worker(group)
    outdated, plan.outdated = plan.outdated, []
    if view.is_proven(template) and not view.job.unknown:
        for make in view.counted[group.name]:
            outdated += view.pod_index.healthy[make].values() if make.template != template else ()
    if outdated:
        plan.is_updating = True
        going = heapq.nsmallest(plan.may_go, outdated, key=lambda pod: pod.index)
        plan.may_go -= len(going)
        plan.actions += [DeletePod(pod=pod, why="its template changed") for pod in going]


def _scale_down(view: View, plan: WorkerPlan, group: WorkerGroup, slot: Slot) -> None:
    """Delete a surplus pod once the head reports that its worker has finished its batch."""
    for pod in slot.pods:
        if pod.is_terminating:
            continue
        if not pod.is_ready or view.live_head is None or _is_released(view, group):
            plan.actions.append(DeletePod(pod=pod, why="its group was scaled down"))
        elif pod.retiring_since is None:
            plan.is_waiting_for_head = True
            plan.actions.append(MarkPod(pod=pod, annotation=names.RETIRING, at=view.now))
        elif view.now >= (until := view.after(pod.retiring_since, view.policy.drain_seconds)):
            plan.actions.append(DeletePod(pod=pod, why="it did not finish its batch in time"))
        else:
            plan.is_waiting_for_head = True
            plan.dues.append(until)


def _is_released(view: View, group: WorkerGroup) -> bool:
    answer = view.answer
    if answer is None:
        return False
    if not any(view.sizes.values()):
        return answer.pause_state == "paused"
    skipped = (answer.empty_slots or {}).get(group.name, ())
    above_highest = answer.sizes.get(group.name, 0) + len(skipped)
    return above_highest <= view.sizes[group.name] and not answer.is_resizing


def live_workers(view: View) -> Iterator[Pod]:
    return (pod for pod in view.pods if pod.role == "worker" and not pod.is_terminating)
