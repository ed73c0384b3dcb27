"""Decides about the head: one per epoch, and its replacement.

epoch 1 runs -> fails                      -> backoff, epoch 2; counted
             -> is deleted, evicted, lost  -> epoch 2; not counted
             -> is outdated                -> new image verified, then replaced by epoch 2; not counted
             -> exits with 0               -> the job is complete
"""

from dataclasses import dataclass
from datetime import datetime

from cormorant_contract.children import HEAD
from cormorant_operator.decide.backoff import RESET_AFTER_S, next_attempt_at
from cormorant_operator.decide.canary import tidy_canaries, try_image
from cormorant_operator.decide.plan import Action, CheckNode, CreatePod, DeletePod
from cormorant_operator.decide.progress import frames_settled
from cormorant_operator.decide.view import View
from cormorant_operator.names import Manifest
from cormorant_operator.observed import Pod
from cormorant_operator.render.children import config_map
from cormorant_operator.render.pods import PodOrigin, head_pod


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    actions: tuple[Action, ...] = ()
    epoch: int = 0
    """Epoch that the Services select."""
    is_coming: bool = False
    """A head is live, is created now, or will be after a backoff."""
    is_replacing: bool = False
    """A healthy head is replaced, because its template changed."""
    is_trying: bool = False
    """The head keeps running until the next image is verified."""
    due: datetime | None = None


def plan_head(view: View) -> HeadPlan:
    """Keep one live head with the current template."""
    live, newest = view.live_head, view.newest_head
    tidy, tidy_at = _tidy(view)
    tidy = (*tidy, *tidy_canaries(view))
    if live is not None:
        if live.template != view.templates.head and _may_replace(view):
            trial = try_image(view, render_head(view, epoch=view.epoch + 1))
            if not trial.is_over:
                actions = (*tidy, *trial.actions)
                due = min((at for at in (tidy_at, trial.due) if at is not None), default=None)
                return HeadPlan(actions=actions, epoch=live.epoch, is_coming=True, is_trying=True, due=due)
            replace = DeletePod(pod=live, why="its template changed")
            return HeadPlan(actions=(*tidy, replace), epoch=live.epoch, is_coming=True, is_replacing=True)
        return HeadPlan(actions=tidy, epoch=live.epoch, is_coming=True, due=tidy_at)
    if not view.is_proven(view.templates.head) or not view.may_create:
        return HeadPlan(actions=tidy, epoch=view.epoch)
    if (until := view.refused_until(HEAD)) is not None:
        return HeadPlan(actions=tidy, epoch=view.epoch, due=until)
    not_before = _blocked_until(view, newest) if newest is not None else None
    if newest is not None and not_before is not None and not_before > view.now:
        nodes, look_at = view.nodes_to_check([newest])
        looks = tuple(CheckNode(name=name) for name in nodes)
        due = min(not_before, look_at or not_before)
        return HeadPlan(actions=(*tidy, *looks), epoch=view.epoch, is_coming=True, due=due)
    epoch = view.epoch + 1
    create = CreatePod(owner=HEAD, manifest=render_head(view, epoch=epoch))
    return HeadPlan(actions=(*tidy, create), epoch=epoch, is_coming=True)


def render_head(view: View, *, epoch: int) -> Manifest:
    image = view.job.spec.image or view.defaults.image
    origin = PodOrigin(
        template=view.templates.head,
        base_image=image,
        cuda_image=view.next_cuda_image,
        failures=view.head_failures,
        placement=view.placement(HEAD),
    )
    config = config_map(view.job, digest=view.templates.config)["metadata"]["name"]
    # Unacknowledged frames are lost with their head; the next one collects them again.
    return head_pod(view.job, view.defaults, origin, epoch=epoch, floor_frames=frames_settled(view), config=config)


def _blocked_until(view: View, pod: Pod) -> datetime | None:
    """When the next head may start; None: now."""
    if pod.must_wait and not pod.is_terminating:
        return next_attempt_at(pod)
    # A terminating head lets learners acknowledge the batches they hold, and counts them. One that never ran holds no
    # batches, and one on a lost node cannot report.
    if pod.is_terminating and pod.phase == "Running" and not view.is_lost(pod):
        return pod.deletion_deadline
    return None


def _may_replace(view: View) -> bool:
    """Whether all new templates are verified: a running job is not torn down for an invalid manifest."""
    # Unknown fields may be part of what the running pods were created from.
    return (
        not view.job.unknown
        and view.may_create
        and view.is_proven(view.templates.head)
        and all(view.is_proven(view.templates.worker(group)) for group in view.groups)
    )


def _tidy(view: View) -> tuple[tuple[Action, ...], datetime | None]:
    """Delete earlier heads; the last one that ended is kept for its log until its successor has run for a while."""
    live, earlier = view.live_head, view.heads[:-1]
    orders = [DeletePod(pod=pod, why="a newer head took over") for pod in earlier if pod.is_live]
    ended = [pod for pod in earlier if pod.is_terminal and not pod.is_terminating]
    orders += [DeletePod(pod=pod, why="a newer head took over") for pod in ended[:-1]]
    if ended and ended[-1].has_sidecar:
        # Its failure count is in the annotations of its successor.
        return (*orders, DeletePod(pod=ended[-1], why="it ended but its sidecar is still running")), None
    if not ended or live is None or live.ready_since is None:
        return tuple(orders), None
    until = view.after(live.ready_since, RESET_AFTER_S)
    if view.now >= until:
        return (*orders, DeletePod(pod=ended[-1], why="its successor is healthy")), None
    return tuple(orders), until
