"""Decides about workers: fills empty slots, rolls outdated pods, scales down."""

import heapq
from dataclasses import dataclass

from cormorant_contract.workers import WorkerGroup
from cormorant_operator import names
from cormorant_operator.decide.plan import CreatePod, Draft, delete_pod, mark_pod
from cormorant_operator.decide.view import View
from cormorant_operator.names import Manifest
from cormorant_operator.pods import Pod, Slot
from cormorant_operator.render.pods import PodOrigin, worker_pod

_MAX_CREATES = 50
"""Pods created per reconcile; the next reconcile creates more."""


def plan_workers(view: View, draft: Draft) -> None:
    """Decide about every worker pod, once the head is decided about."""
    live, image = view.live_head, view.job.spec.image
    # While the live head has another image than new workers would, workers are replaced with the head.
    is_of_another_image = live is not None and bool(image) and live.base_image != image
    slots = [slot for group in view.groups for slot in view.wanted_slots(group.name)]
    missing = sum(slot.live is None or not slot.live.is_ready for slot in slots)
    plan = _WorkerPlan(
        view,
        draft,
        may_create=draft.is_head_coming and view.may_create,
        may_update=view.may_create and not is_of_another_image,
        creates_left=_MAX_CREATES,
        may_go=max(0, view.policy.unavailable_of(sum(view.sizes.values())) - missing),
    )
    for group in view.groups:
        plan.add(group)
    for name, pods in view.examined_workers.items():
        if name not in view.sizes:
            draft.actions += [delete_pod(pod, "its group was removed") for pod in pods if not pod.is_terminating]


def render_worker(view: View, group: WorkerGroup) -> Manifest:
    """A worker pod of a group with the current template."""
    image = view.job.spec.image
    origin = PodOrigin(
        base_image=image or view.base_image,
        cuda_image="" if image else view.cuda_image,
    )
    return worker_pod(view.job, view.defaults, origin, group=group, index=0, attempt=0)


@dataclass(slots=True)
class _WorkerPlan:
    view: View
    draft: Draft
    may_create: bool
    may_update: bool
    creates_left: int
    may_go: int
    """Ready workers that may be replaced now."""

    def add(self, group: WorkerGroup) -> None:
        """Decide about the slots of a group."""
        view, draft, template = self.view, self.draft, self.view.job.templates.worker(group)
        is_proven = view.is_proven(template)
        is_updating, outdated = False, list[Pod]()
        for slot in view.slots[group.name]:
            if slot.index >= view.sizes[group.name]:
                self._scale_down(group, slot)
                continue
            live, (over, until) = slot.live, slot.leftovers(view.now)
            # Pods that returned with a node that counted as lost.
            superseded = [pod for pod in slot.pods if pod.is_live and pod is not live]
            draft.actions += [delete_pod(pod, "a newer attempt fills its slot") for pod in superseded]
            draft.actions += [delete_pod(pod, "its successor is running") for pod in over]
            draft.dues += [until] if until is not None else []
            if live is None:
                if self.may_create and is_proven:
                    self._fill(group, slot)
                continue
            if live.retiring_since is not None:
                draft.actions.append(mark_pod(live, names.RETIRING, None))
            # Ray and Python must match in all pods of a Ray cluster: a worker with another image cannot join.
            is_foreign = live.base_image != view.base_image
            is_outdated = is_foreign or (live.template != template and not view.job.unknown)
            if not (self.may_update and is_outdated and is_proven):
                continue
            is_updating = True
            if not is_foreign and live.is_ready:
                outdated.append(live)
            else:
                draft.actions.append(delete_pod(live, "its template changed"))
        if self.may_update and is_proven and not view.job.unknown:
            for build in view.counted[group.name]:
                outdated += view.record.pod_index.healthy[build].values() if build.template != template else ()
        if (is_updating or outdated) and draft.updating == "UpToDate":
            draft.updating = "RollingUpdate"
        # At most `may_go` of them, lowest indices first.
        for pod in heapq.nsmallest(self.may_go, outdated, key=lambda pod: pod.index):
            self.may_go -= 1
            draft.actions.append(delete_pod(pod, "its template changed"))

    def _fill(self, group: WorkerGroup, slot: Slot) -> None:
        view, template, newest = self.view, self.view.job.templates.worker(group), slot.newest
        waits = (view.refused_until(group.name), slot.waits_until(template))
        until = max((at for at in waits if at is not None and at > view.now), default=None)
        if until is not None or self.creates_left == 0:
            self.draft.dues.append(until or view.now)
            return
        self.creates_left -= 1
        origin = PodOrigin(
            base_image=view.base_image,
            cuda_image=view.cuda_image,
            failures=slot.failures(template),
            restarts=slot.restarts,
            placement=view.placement(group.name),
            gang=view.gang,
        )
        attempt = max(slot.last_attempt, newest.attempt if newest is not None else -1) + 1
        manifest = worker_pod(view.job, view.defaults, origin, group=group, index=slot.index, attempt=attempt)
        self.draft.actions.append(CreatePod(owner=group.name, manifest=manifest))

    def _scale_down(self, group: WorkerGroup, slot: Slot) -> None:
        """Delete a surplus pod once the head reports that its worker has finished its batch."""
        view, draft = self.view, self.draft
        for pod in slot.pods:
            if pod.is_terminating:
                continue
            if not pod.is_ready or view.live_head is None or _is_released(view, group):
                draft.actions.append(delete_pod(pod, "its group was scaled down"))
            elif pod.retiring_since is None:
                draft.is_urgent = True
                draft.actions.append(mark_pod(pod, names.RETIRING, view.now))
            elif view.now >= (until := view.drained_by(pod.retiring_since)):
                draft.actions.append(delete_pod(pod, "it did not finish its batch in time"))
            else:
                draft.is_urgent = True
                draft.dues.append(until)


def _is_released(view: View, group: WorkerGroup) -> bool:
    answer = view.answer
    if answer is None:
        return False
    if not any(view.sizes.values()):
        return answer.pause_state == "paused"
    skipped = answer.empty_slots.get(group.name, ())
    above_highest = answer.sizes.get(group.name, 0) + len(skipped)
    return above_highest <= view.sizes[group.name] and not answer.is_resizing
