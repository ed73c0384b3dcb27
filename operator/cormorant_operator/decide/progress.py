"""How far a job is, and whether it stands still. Frames never go back within an epoch, whatever a head says."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cormorant_contract.status import FramesStatus, WeightsStatus
from cormorant_operator.decide.obstacles import is_waiting_for_room
from cormorant_operator.decide.view import View
from cormorant_operator.job import find, is_true, since

_MOMENT_POLLS = 4
"""A large batch takes a while: so many looks without a new frame mean nothing yet."""


def frames_settled(view: View) -> int:
    """Frames that no later head collects again: of the status, of heads' answers and last words."""
    known = [view.job.status.frames.settled]
    if view.observed.answer is not None:
        known.append(view.observed.answer.settled)
    target = view.job.spec.collection.total_frames
    for head in view.heads:
        if head.settled_frames is not None:
            known.append(head.settled_frames)
        if head.phase == "Succeeded" and target is not None:
            known.append(target)
    return max(known)


def frames_collected(view: View, *, epoch: int = 0) -> int:
    """Frames that are collected. They never go back within an epoch; at a new one, what died with the head is gone.

    Args:
        view: the moment.
        epoch: of the head that counts; 0: the newest that there is.
    """
    before, newest = view.job.status, view.newest_head
    known = [frames_settled(view)]
    if max(epoch, view.epoch) == before.epoch:
        known.append(before.frames.collected)
    answer = view.observed.answer
    if answer is not None and newest is not None and answer.pod_uid == newest.uid and newest.epoch >= epoch:
        known.append(answer.frames)
    return max(known)


def is_all_collected(view: View) -> bool:
    """Whether nothing is left to collect."""
    target = view.job.spec.collection.total_frames
    return target is not None and frames_collected(view) >= target


def frames_status(view: View, *, epoch: int = 0) -> FramesStatus:
    """`status.frames`, of the newest head or of the one of an epoch that begins."""
    before, collected = view.job.status.frames, frames_collected(view, epoch=epoch)
    answer = view.answer
    head = view.live_head
    if answer is not None:
        rate = round(answer.per_second, 1)
    else:
        rate = before.per_second if head is not None and head.is_ready else 0.0
    return FramesStatus(
        collected=collected,
        settled=frames_settled(view),
        target=view.job.spec.collection.total_frames,
        per_second=rate,
        last_progress_time=view.now if collected > before.collected else before.last_progress_time,
    )


def weights_status(view: View) -> WeightsStatus:
    """`status.weights`; versions never go back either."""
    before, answer = view.job.status.weights, view.answer
    if answer is None or answer.version < before.version:
        return before
    is_new = answer.version > before.version
    return WeightsStatus(
        version=answer.version,
        min_applied_version=min(answer.min_applied_version, answer.version),
        updated_time=view.now if is_new else before.updated_time,
    )


def pause_reason(view: View) -> str:
    """Why the fleet stands still on purpose; empty when it does not."""
    if view.job.spec.paused:
        return "Spec"
    if not any(view.sizes.values()):
        return "NoWorkers"
    # A fleet that stands still and that nobody holds is about to go on: spec.paused was taken back a moment ago.
    answer = view.answer
    return "API" if answer is not None and answer.is_leased and answer.pause_state != "running" else ""


def is_waiting_for_consumer(view: View) -> bool:
    """Whether workers stand still until somebody takes a batch."""
    return view.answer is not None and view.answer.is_queue_full


def moving_until(view: View) -> datetime | None:
    """Until when frames count as just counted, if no more come; None: there were none."""
    last = frames_status(view).last_progress_time
    return last + timedelta(seconds=_MOMENT_POLLS * view.defaults.poll_s) if last is not None else None


def is_moving(view: View) -> bool:
    """Whether frames were counted a moment ago."""
    until = moving_until(view)
    return until is not None and view.now < until


def _unpaused_at(view: View) -> datetime | None:
    """When a pause ended that the status still knows of; now, if it has just ended."""
    if is_true(view.job.status, "Paused"):
        return view.now
    return since(view.job.status, "Paused", "False")


def _served_at(view: View) -> datetime | None:
    """When the wait for a learner ended that the status still knows of; now, if it has just ended."""
    before = find(view.job.status, "Progressing")
    if before is not None and before.reason == "WaitingForConsumer":
        return view.now
    return since(view.job.status, "Progressing", "False")


def _placed_at(view: View) -> datetime | None:
    """When the wait for a volume of a lost node ended that the status still knows of; now, if it has just ended."""
    before = find(view.job.status, "Scheduled")
    if before is not None and before.reason == "VolumeOnLostNode":
        return view.now
    return since(view.job.status, "Scheduled", "True")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Something that must happen before a time."""

    at: datetime
    known_until: datetime
    """Up to when it is known that it did not happen."""

    @property
    def is_over(self) -> bool:
        """Whether it is known that it did not happen in time."""
        return self.known_until >= self.at


def stall_deadline(view: View) -> Deadline | None:
    """When a job that collects nothing counts as stalled; None while it need not collect anything, or nobody knows.

    It must while head and workers are ready, nobody paused it, and there is room for batches. Time counts only while
    this operator hears the head say that no frame came: a silent head, or one that was not asked yet, may well collect.
    An unscheduled pod makes no stall: replacing it would cost its place in the scheduler's queue.
    """
    limit = view.policy.progress_deadline_seconds
    ready, heard, until = since(view.job.status, "Ready", "True"), view.answering_since, view.answered_at
    if not limit or ready is None or heard is None or until is None or not view.has_enough:
        return None
    if is_all_collected(view) or pause_reason(view) or is_waiting_for_consumer(view):
        return None
    status = view.job.status
    starts = (
        ready,
        heard,
        status.start_time,
        frames_status(view).last_progress_time,
        _unpaused_at(view),
        _served_at(view),
    )
    return _deadline(starts, limit_s=limit, known_until=until)


def startup_deadline(view: View) -> Deadline | None:
    """When a job that is not ready, or never collected anything, fails; None: it is, or may take for ever.

    Each new pod has the whole time from its node on, and so has a job after a pause. What waits for a node keeps its
    place, as `onUnschedulable` says; what the API server cannot make, by a quota or a fault, is asked for again; and
    where a pod is about to come there is nothing to judge yet.
    """
    limit, status = view.policy.startup_deadline_seconds, view.job.status
    if not limit or status.start_time is None or is_all_collected(view) or pause_reason(view):
        return None
    if is_waiting_for_room(view) or _is_awaiting_pod(view):
        return None
    known_until = view.now
    if not view.has_enough:
        needed = (pod for pod in view.busy if pod.role != "canary")
        starting = [pod.starting_since for pod in needed if pod.is_live and not pod.is_ready]
        began = [since(status, "Ready", "False") or view.now, _placed_at(view), *starting]
    elif has_collected(view) or view.answering_since is None or view.answered_at is None:
        return None
    else:
        began, known_until = [view.answering_since], view.answered_at
    starts = (*began, frames_status(view).last_progress_time, status.start_time, _unpaused_at(view))
    return _deadline(starts, limit_s=limit, known_until=known_until)


def _deadline(starts: Iterable[datetime | None], *, limit_s: float, known_until: datetime) -> Deadline:
    began = max(start for start in starts if start is not None)
    return Deadline(at=began + timedelta(seconds=limit_s), known_until=known_until)


def has_collected(view: View) -> bool:
    """Whether a frame was ever counted, by whichever head."""
    return frames_status(view).last_progress_time is not None or frames_collected(view) > 0


def _is_awaiting_pod(view: View) -> bool:
    """Whether a pod that the job lacks will be made, or goes on purpose."""
    head = view.live_head
    if head is None:
        return not view.is_refused(view.templates.head)
    if head.draining_since is not None:
        return True
    return head.is_ready and any(
        slot.live is None and slot.index < view.sizes[group.name] and not view.is_refused(view.templates.worker(group))
        for group in view.groups
        for slot in view.slots[group.name]
    )


def drain_deadline(view: View) -> Deadline | None:
    """When a job of which everything is collected is complete, though learners did not take all of it.

    Time counts only while this operator hears the head: a learner may have taken much while nobody looked.
    """
    last, heard, until = frames_status(view).last_progress_time, view.answering_since, view.answered_at
    if last is None or heard is None or until is None or not is_all_collected(view):
        return None
    if is_true(view.job.status, "Suspended"):
        return None
    return _deadline((last, heard), limit_s=view.policy.drain_seconds, known_until=until)
