"""`reconcile` decides what to do about a job, from its arguments alone.

Any operator may call it at any time and any number of times. If everything is as it should be, the plan is empty.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from cormorant_contract.children import tokens_secret
from cormorant_operator import names
from cormorant_operator.cache import JobRecord
from cormorant_operator.decide.conditions import Decision
from cormorant_operator.decide.events import events_between
from cormorant_operator.decide.heads import HeadPlan, plan_head, render_head
from cormorant_operator.decide.obstacles import Fit, fit
from cormorant_operator.decide.outcome import clean_up, find_outcome, outcome_dues
from cormorant_operator.decide.plan import (
    Action,
    ApplyChild,
    CheckTemplate,
    CreatePod,
    CreateTokens,
    DeleteChild,
    DeleteJob,
    DeletePod,
    MarkPod,
    Plan,
    SetDesired,
    owner_of,
)
from cormorant_operator.decide.progress import moving_until, stall_deadline
from cormorant_operator.decide.queueing import queue_actions
from cormorant_operator.decide.status import is_counters_only, make_status, write_at
from cormorant_operator.decide.suspension import Suspension, plan_suspension
from cormorant_operator.decide.view import View
from cormorant_operator.decide.workers import plan_workers, render_worker
from cormorant_operator.defaults import OperatorDefaults
from cormorant_operator.job import Fact, Job
from cormorant_operator.job_state import JobState
from cormorant_operator.names import Manifest
from cormorant_operator.observed import Obstacle
from cormorant_operator.render.children import budgets, certificates, config_map, digest_of, network_policy, services

_CHANGES = (DeletePod, MarkPod, DeleteChild, DeleteJob)


def reconcile(job: Job, record: JobRecord, state: JobState, now: datetime, *, defaults: OperatorDefaults) -> Plan:
    """The plan for a job. `now` is aware. Changes nothing."""
    view = View(job, record, state, now.replace(microsecond=0), defaults)
    return _without_refused(view, _decide(view))


def _decide(view: View) -> Plan:
    job = view.job
    if job.identity.is_deleting or job.spec.is_of_others:
        return Plan()  # Kubernetes deletes its pods; another controller manages it
    if job.is_over:
        plan = clean_up(view)
        return replace(plan, actions=(*plan.actions, *queue_actions(view)))
    outcome = find_outcome(view)
    if outcome is not None:
        return _end(view, outcome)
    suspension = plan_suspension(view)
    if suspension.state != "no":
        return _suspend(view, suspension)
    stalled = stall_deadline(view)
    if stalled is not None and stalled.is_over:
        return _restart(view)
    return _run(view)


def _without_refused(view: View, plan: Plan) -> Plan:
    """Postpone deletions and changes that the API server refused recently; keep the rest of the plan."""
    if not view.state.refusals:
        return plan
    actions: list[Action] = []
    dues = [plan.due] if plan.due is not None else []
    for action in plan.actions:
        until = view.refused_until(owner_of(action)) if isinstance(action, _CHANGES) else None
        if until is None:
            actions.append(action)
        else:
            dues.append(until)
    return replace(plan, actions=tuple(actions), due=min(dues, default=None))


def _end(view: View, outcome: Fact) -> Plan:
    # Written before the cleanup: a deleted head must not look like one to replace.
    decision = Decision(outcome=outcome)
    return _plan(view, decision, (), dues=(view.now,), epoch=view.epoch)


def _suspend(view: View, suspension: Suspension) -> Plan:
    dues = [suspension.due] if suspension.due is not None else []
    actions = (*suspension.actions, *queue_actions(view))
    return _plan(view, Decision(suspension=suspension.state), actions, dues=dues, epoch=view.epoch)


def _restart(view: View) -> Plan:
    """Replace the head and all workers of a stalled job. The stall counts as a failure of the head."""
    head = view.live_head
    assert head is not None, "a job without a head is not stalled"
    orders: list[Action] = [MarkPod(pod=head, annotation=names.STALLED, at=view.now)]
    orders += [DeletePod(pod=pod, why="the job stalled") for pod in view.pods if pod.is_live]
    failures = view.head_failures + (head.stalled_since is None)
    return _plan(view, Decision(is_stalled=True), orders, dues=(view.now,), epoch=head.epoch, head_restarts=failures)


def _run(view: View) -> Plan:
    if _is_unclaimed(view):
        # Pods would mount any Secret of this name: create them once the name is known to be free.
        claim = (*_children(view, HeadPlan()), *_checks(view))
        return _plan(view, Decision(), claim, dues=view.retries(), epoch=view.epoch)
    head = plan_head(view)
    workers = plan_workers(
        view,
        may_create=head.is_coming and view.may_create,
        may_update=view.may_create and not _is_of_another_image(view),
    )
    actions = (
        *_children(view, head),
        *_checks(view),
        *queue_actions(view),
        *head.actions,
        *workers.actions,
        *_orders_to_head(view, head),
    )
    dues = [*workers.dues, *outcome_dues(view), *view.retries(), *([head.due] if head.due is not None else [])]
    decision = Decision(
        is_replacing_head=head.is_replacing, is_updating=workers.is_updating, is_trying_image=head.is_trying
    )
    is_urgent = workers.is_waiting_for_head or (view.answer is not None and view.answer.is_resizing)
    return _plan(view, decision, actions, dues=dues, epoch=head.epoch, is_urgent=is_urgent)


def _is_of_another_image(view: View) -> bool:
    """Whether the live head has another image than new workers would: workers are replaced with the head."""
    live, image = view.live_head, view.job.spec.image
    return live is not None and bool(image) and live.base_image != image


def _children(view: View, head: HeadPlan) -> Iterator[Action]:
    """Create, correct or delete Services, policies, ConfigMap and Secret where they differ."""
    config = config_map(view.job, digest=view.templates.config)
    is_unclaimed = _is_unclaimed(view)
    if _may_lack_tokens(view, head) and view.refused_until("Secret") is None:
        yield CreateTokens(claim=config if is_unclaimed else None, is_wrong=_are_tokens_wrong(view))
    wanted: list[Manifest] = [] if is_unclaimed else [config]
    if view.defaults.has_network_policies:
        wanted.append(network_policy(view.job, view.defaults))
    wanted += [] if is_unclaimed else certificates(view.job)
    if head.epoch:
        wanted += services(view.job, epoch=head.epoch)
        wanted += budgets(view.job, workers=sum(view.sizes.values()))
    for manifest in wanted:
        key = (manifest["kind"], manifest["metadata"]["name"])
        if view.children.get(key) != digest_of(manifest) and view.refused_until(manifest["kind"]) is None:
            yield ApplyChild(manifest=manifest)
    live, names_wanted = view.live_head, {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted}
    is_current = live is not None and live.template == view.templates.head
    for kind, name in sorted(view.children.keys() - names_wanted):
        if kind == "ConfigMap" and is_current:
            yield DeleteChild(kind="ConfigMap", name=name)
        elif kind == "PodDisruptionBudget" and head.epoch:
            yield DeleteChild(kind="PodDisruptionBudget", name=name)


def _is_unclaimed(view: View) -> bool:
    """Whether nothing of the job was created yet, so that an existing Secret of its name is not its own."""
    has_config = any(kind == "ConfigMap" for kind, _ in view.children)
    return not (has_config or view.pods or view.job.status.epoch)


def _may_lack_tokens(view: View, head: HeadPlan) -> bool:
    """Whether the Secret may be missing. The operator cannot read it; creating an existing one is harmless."""
    if not view.state.has_tokens:
        return True
    # A head mounts it. Without it the pod waits for its volume, and no pod condition says so.
    if view.epoch and any(isinstance(action, CreatePod) for action in head.actions):
        return True
    secret = tokens_secret(view.job.name)
    return any(pod.obstacle is Obstacle.CONTAINER_CONFIG and secret in pod.obstacle_message for pod in view.examined)


def _are_tokens_wrong(view: View) -> bool:
    refused = view.state.refused_since
    return refused is not None and view.now >= view.after(refused, view.defaults.secret_sync_s)


def _checks(view: View) -> Iterator[Action]:
    """Dry runs of unverified templates. Until they are answered, no pod is created or replaced."""
    if view.refused_until("Pod") is not None:
        return
    template = view.templates.head
    if not view.is_proven(template) and view.verdict(template) is None:
        yield CheckTemplate(template=template, manifest=render_head(view, epoch=view.epoch + 1))
    for group in view.groups:
        template = view.templates.worker(group)
        if not view.is_proven(template) and view.verdict(template) is None:
            yield CheckTemplate(template=template, manifest=render_worker(view, group))


def _orders_to_head(view: View, head: HeadPlan) -> Iterator[Action]:
    live, answer = view.live_head, view.answer
    if live is None or answer is None or head.is_replacing or answer.phase in ("Draining", "Completed", "Failed"):
        return
    told, wanted = Fit(sizes=answer.sizes, empty_slots=answer.empty_slots or {}), fit(view)
    has_workers = any(wanted.sizes.values())
    # A fleet without workers is refused: it is paused instead.
    wanted = wanted if has_workers else told
    is_paused = view.job.spec.paused or not has_workers
    if wanted != told or answer.is_spec_paused != is_paused:
        yield SetDesired(pod=live, sizes=wanted.sizes, empty_slots=wanted.empty_slots, paused=is_paused)


def _plan(
    view: View,
    decision: Decision,
    actions: Iterable[Action],
    *,
    dues: Iterable[datetime],
    epoch: int,
    head_restarts: int | None = None,
    is_urgent: bool = False,
) -> Plan:
    failures = view.head_failures if head_restarts is None else head_restarts
    status = make_status(view, decision, epoch=epoch, head_restarts=failures)
    before = view.job.status
    at = write_at(before, status, now=view.now, interval_s=view.defaults.counters_interval_s)
    is_worth = at == view.now
    head = view.live_head
    is_asked = head is not None and head.is_asked
    # Poll the head before the write, so that the counters are current.
    counters_at = _whole(at) if at is not None and not is_worth and is_asked else None
    later = [due for due in (at if counters_at is None else None, moving_until(view)) if due is not None]
    pace = view.defaults.fast_poll_s if is_urgent or decision.suspension == "draining" else view.defaults.poll_s
    return Plan(
        actions=tuple(actions),
        status=status if is_worth else None,
        is_counters_only=is_worth and is_counters_only(before, status),
        counters_at=counters_at,
        events=events_between(before, status) if is_worth else (),
        due=min((_whole(due) for due in (*dues, *(due for due in later if due > view.now))), default=None),
        poll_s=pace if is_asked else None,
    )


def _whole(due: datetime) -> datetime:
    """Round up to a whole second: `view.now` is truncated, so an earlier look would decide nothing."""
    return due if due.microsecond == 0 else due.replace(microsecond=0) + timedelta(seconds=1)
