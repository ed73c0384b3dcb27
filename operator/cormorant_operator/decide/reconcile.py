"""`reconcile` decides what to do about a job, as a pure function of its arguments.

Any operator may call it at any time and any number of times. If nothing differs from the spec, the plan is empty.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from cormorant_contract.children import tokens_secret
from cormorant_contract.rest.control import Desired
from cormorant_operator import names
from cormorant_operator.cache import JobRecord
from cormorant_operator.decide import plan
from cormorant_operator.decide.heads import plan_head, plan_suspension, render_head
from cormorant_operator.decide.obstacles import fit
from cormorant_operator.decide.progress import find_outcome, moving_until, outcome_dues, stall_deadline
from cormorant_operator.decide.queueing import queue_actions
from cormorant_operator.decide.status import events_between, is_counters_only, make_status, write_at
from cormorant_operator.decide.view import View
from cormorant_operator.decide.workers import plan_workers, render_worker
from cormorant_operator.job import Job
from cormorant_operator.job_state import JobState
from cormorant_operator.pods import Obstacle
from cormorant_operator.render.children import budgets, certificates, config_map, digest_of, network_policy, services
from cormorant_operator.settings import OperatorDefaults

_CHANGES = (plan.Delete, plan.Patch, plan.DeleteJob)


def reconcile(job: Job, record: JobRecord, state: JobState, now: datetime, *, defaults: OperatorDefaults) -> plan.Plan:
    """The plan for a job. `now` is aware. Changes nothing."""
    view = View(job, record, state, now.replace(microsecond=0), defaults)
    full = _decide(view)
    # Postpone deletions and changes that the API server refused recently; keep the rest of the plan.
    actions: list[plan.Action] = []
    dues = [full.due] if full.due is not None else []
    for action in full.actions:
        until = view.refused_until(plan.refusal_of(action)[0]) if isinstance(action, _CHANGES) else None
        if until is None:
            actions.append(action)
        else:
            dues.append(_whole(until))
    return replace(full, actions=tuple(actions), due=min(dues, default=None))


def _decide(view: View) -> plan.Plan:
    job, head = view.job, view.live_head
    if job.is_deleting or job.spec.is_of_others:
        return plan.Plan()  # Kubernetes deletes its pods; another controller manages it
    if job.is_over:
        return _clean_up(view)
    draft = plan.Draft(epoch=view.epoch, head_restarts=view.head_failures)
    draft.outcome = find_outcome(view)
    if draft.outcome is not None:
        # Written before the cleanup: a deleted head must not look like one to replace.
        draft.dues.append(view.now)
        return _plan(view, draft)
    plan_suspension(view, draft)
    if draft.suspension != "no":
        draft.actions += queue_actions(view)
        return _plan(view, draft)
    stalled = stall_deadline(view)
    if stalled is not None and stalled.is_over:
        # Replace the head and all workers. The stall counts as a failure of the head.
        assert head is not None, "a job without a head is not stalled"
        draft.is_stalled = True
        draft.head_restarts += head.stalled_since is None
        draft.actions.append(plan.mark_pod(head, names.STALLED, view.now))
        draft.actions += [plan.delete_pod(pod, "the job stalled") for pod in view.record.pods if pod.is_live]
        draft.dues.append(view.now)
        return _plan(view, draft)
    if _is_unclaimed(view):
        # Pods would mount any Secret of this name: create them once the name is known to be free.
        draft.actions += (*_children(view, draft), *_checks(view))
        draft.dues += view.retries()
        return _plan(view, draft)
    plan_head(view, draft)
    draft.actions[:0] = (*_children(view, draft), *_checks(view), *queue_actions(view))
    plan_workers(view, draft)
    draft.actions += _orders_to_head(view, draft)
    draft.dues += (*outcome_dues(view), *view.retries())
    draft.is_urgent |= view.answer is not None and view.answer.is_resizing
    return _plan(view, draft)


def _clean_up(view: View) -> plan.Plan:
    """The plan for a job whose end is in its status. Nothing is created for it again."""
    policy, finished = view.policy, view.job.status.completion_time
    over = None
    if finished is not None and policy.ttl_seconds_after_finished is not None:
        over = view.after(finished, policy.ttl_seconds_after_finished)
    if over is not None and view.now >= over:
        return plan.Plan(actions=(plan.DeleteJob(), *queue_actions(view)))
    # Keep an ended head for its log; delete one that still occupies a node.
    going = [
        pod
        for pod in view.record.pods
        if not pod.is_terminating
        and policy.clean_pod_policy != "None"
        and (pod.role != "head" or policy.clean_pod_policy == "All" or not pod.is_terminal or pod.has_sidecar)
    ]
    orders = [plan.delete_pod(pod, "the job has ended") for pod in going]
    return plan.Plan(actions=(*orders, *queue_actions(view)), due=over)


def _children(view: View, draft: plan.Draft) -> Iterator[plan.Action]:
    """Create, correct or delete Services, policies, ConfigMap and Secret where they differ, for the head in `draft`."""
    config = config_map(view.job)
    is_unclaimed = _is_unclaimed(view)
    # The operator cannot read the Secret; creating an existing one is harmless. A pod whose Secret is missing waits for
    # its volume, and no condition of a head's pod reports that.
    secret = tokens_secret(view.job.name)
    may_lack_tokens = (
        not view.state.has_tokens
        or (view.epoch and any(isinstance(action, plan.CreatePod) for action in draft.actions))
        or any(pod.obstacle is Obstacle.CONTAINER_CONFIG and secret in pod.obstacle_message for pod in view.examined)
    )
    if may_lack_tokens and view.refused_until("Secret") is None:
        # Rejected for longer than a running head needs to read a Secret that was created again (kubelets need about a
        # minute): it must have been changed.
        refused = view.state.refused_since
        is_wrong = refused is not None and view.now >= view.after(refused, 12 * view.defaults.poll_s)
        yield plan.CreateTokens(claim=config if is_unclaimed else None, is_wrong=is_wrong)
    wanted = [network_policy(view.job)] if view.defaults.has_network_policies else []
    wanted += view.pod_groups
    if not is_unclaimed:
        wanted = [config, *wanted, *certificates(view.job)]
        if draft.epoch:
            wanted += services(view.job, epoch=draft.epoch)
            wanted += budgets(view.job, workers=sum(view.sizes.values()))
    keys = set()
    for manifest in wanted:
        key = manifest["kind"], manifest["metadata"]["name"]
        keys.add(key)
        if view.children.get(key) != digest_of(manifest) and view.refused_until(manifest["kind"]) is None:
            yield plan.ApplyChild(manifest=manifest)
    live = view.live_head
    may_go = {
        "ConfigMap": live is not None and live.template == view.job.templates.head,
        "PodDisruptionBudget": draft.epoch and not is_unclaimed,
        "PodGroup": view.defaults.has_pod_groups,
    }
    for uid, child in view.record.members.items():
        if may_go.get(child.kind) and (child.kind, child.name) not in keys:
            yield plan.Delete(kind=child.kind, name=child.name, uid=uid, why="it is not used any more")


def _is_unclaimed(view: View) -> bool:
    """Whether nothing of the job was created yet, so that an existing Secret of its name is not its own."""
    has_config = any(kind == "ConfigMap" for kind, _ in view.children)
    return not (has_config or view.record.pods or view.job.status.epoch)


def _checks(view: View) -> Iterator[plan.Action]:
    """Dry runs of unverified templates. Until they are answered, no pod is created or replaced."""
    if view.refused_until("Pod") is not None:
        return
    for group, template in zip((None, *view.groups), view.all_templates, strict=True):
        if not view.is_proven(template) and view.verdict(template) is None:
            manifest = render_worker(view, group) if group is not None else render_head(view, epoch=view.epoch + 1)
            yield plan.CheckTemplate(template=template, manifest=manifest)


def _orders_to_head(view: View, draft: plan.Draft) -> Iterator[plan.Action]:
    live, answer = view.live_head, view.answer
    if (
        live is None
        or answer is None
        or draft.updating == "ReplacingHead"
        or answer.phase in ("Draining", "Completed", "Failed")
    ):
        return
    told = (answer.sizes, answer.empty_slots)
    # The head refuses a fleet without workers: pause it instead.
    has_workers = any(view.sizes.values())
    sizes, empty_slots = wanted = fit(view) if has_workers else told
    is_paused = view.job.spec.paused or not has_workers
    if wanted != told or answer.is_spec_paused != is_paused:
        desired = Desired(groups=dict(sizes), empty_slots=dict(empty_slots), paused=is_paused)
        yield plan.SetDesired(pod=live, desired=desired)


def _plan(view: View, draft: plan.Draft) -> plan.Plan:
    status, before, head = make_status(view, draft), view.job.status, view.live_head
    at = write_at(before, status, now=view.now, interval_s=view.defaults.counters_interval_s)
    is_worth = at == view.now
    is_asked = head is not None and head.is_asked
    # Poll the head before the write, so that the counters are current.
    counters_at = _whole(at) if at is not None and not is_worth and is_asked else None
    later = [due for due in (at if counters_at is None else None, moving_until(view)) if due is not None]
    is_urgent = draft.is_urgent or draft.suspension == "draining"
    pace = view.defaults.fast_poll_s if is_urgent else view.defaults.poll_s
    return plan.Plan(
        actions=tuple(draft.actions),
        status=status if is_worth else None,
        is_counters_only=is_worth and is_counters_only(before, status),
        counters_at=counters_at,
        events=tuple(events_between(before, status)) if is_worth else (),
        due=min((_whole(due) for due in (*draft.dues, *(due for due in later if due > view.now))), default=None),
        poll_s=pace if is_asked else None,
    )


def _whole(due: datetime) -> datetime:
    """Round up to a whole second: `view.now` is truncated, so an earlier look would decide nothing."""
    return due if due.microsecond == 0 else due.replace(microsecond=0) + timedelta(seconds=1)
