"""Progress, deadlines and the end of a job. Frame counts never decrease within an epoch, and every waiting state has a
deadline.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from cormorant_contract.status import ConditionType, FramesStatus, WeightsStatus
from cormorant_operator.decide.obstacles import (
    acceptance_trouble,
    is_late,
    is_waiting_for_room,
    late_at,
    scheduling_trouble,
)
from cormorant_operator.decide.view import View
from cormorant_operator.job import Fact, find, is_true, since
from cormorant_operator.pods import EXIT_REFUSED, Pod, failures_after

_MOMENT_POLLS = 4
"""Polls without new frames before a job counts as not progressing: large batches take longer than a poll."""


def frames_settled(view: View) -> int:
    """Frames that no later head collects again, according to the status, answers and termination messages."""
    known = [view.job.status.frames.settled]
    if view.state.answer is not None:
        known.append(view.state.answer.settled)
    target = view.job.spec.target
    for head in view.heads:
        if head.settled_frames is not None:
            known.append(head.settled_frames)
        if head.phase == "Succeeded" and target is not None:
            known.append(target)
    return max(known)


def frames_collected(view: View) -> int:
    """Collected frames. They decrease only at a new epoch, by the frames that were lost with the head."""
    before, answer, newest = view.job.status, view.state.answer, view.newest_head
    known = [frames_settled(view)]
    if view.epoch == before.epoch:
        known.append(before.frames.collected)
    if answer is not None and newest is not None and (answer.pod_uid, view.epoch) == (newest.uid, newest.epoch):
        known.append(answer.frames)
    return max(known)


def is_all_collected(view: View) -> bool:
    target = view.job.spec.target
    return target is not None and frames_collected(view) >= target


def frames_status(view: View) -> FramesStatus:
    before, collected = view.job.status.frames, frames_collected(view)
    answer, head = view.answer, view.live_head
    rate = before.per_second if head is not None and head.is_ready else 0.0
    if answer is not None:
        rate = round(answer.per_second, 1)
    return FramesStatus(
        collected=collected,
        settled=frames_settled(view),
        target=view.job.spec.target,
        per_second=rate,
        last_progress_time=view.now if collected > before.collected else before.last_progress_time,
    )


def weights_status(view: View) -> WeightsStatus:
    """`status.weights`; versions never decrease."""
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
    """Why the fleet is paused; empty if it is not."""
    if view.job.spec.paused:
        return "Spec"
    if not any(view.sizes.values()):
        return "NoWorkers"
    # Paused without a lease: spec.paused was just cleared, and the fleet is about to resume.
    answer = view.answer
    return "API" if answer is not None and answer.is_leased and answer.pause_state != "running" else ""


def moving_until(view: View) -> datetime | None:
    """Until when the job counts as progressing if no more frames arrive; None: there were none."""
    last = frames_status(view).last_progress_time
    return last + timedelta(seconds=_MOMENT_POLLS * view.defaults.poll_s) if last is not None else None


def _unpaused_at(view: View) -> datetime | None:
    """When the last pause in the status ended; now, if it has just ended."""
    if is_true(view.job.status, "Paused"):
        return view.now
    return since(view.job.status, "Paused", "False")


def _waited_until(view: View, kind: ConditionType, reason: str, otherwise: str) -> datetime | None:
    """When the last wait ended, according to the reason of a condition; now, if it has just ended."""
    before = find(view.job.status, kind)
    return view.now if before is not None and before.reason == reason else since(view.job.status, kind, otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    at: datetime
    known_until: datetime
    """Latest time until which the awaited progress is known to be absent."""

    @property
    def is_over(self) -> bool:
        """Whether the deadline is known to have passed without progress."""
        return self.known_until >= self.at


def stall_deadline(view: View) -> Deadline | None:
    """When a job that collects no frames counts as stalled; None if it need not collect, or if that is unknown.

    It must collect while head and workers are ready, it is not paused, and the queue has room. Time counts only while
    the head reports to this operator that no frames arrive: a silent head may well be collecting. An unscheduled pod is
    no stall: replacing it would cost its place in the scheduler's queue.
    """
    limit = view.policy.progress_deadline_seconds
    ready, heard = since(view.job.status, "Ready", "True"), view.heard
    if not limit or ready is None or heard is None or not view.has_enough:
        return None
    if is_all_collected(view) or pause_reason(view) or (view.answer is not None and view.answer.is_queue_full):
        return None
    status = view.job.status
    starts = (
        ready,
        heard[0],
        status.start_time,
        frames_status(view).last_progress_time,
        _unpaused_at(view),
        _waited_until(view, "Progressing", "WaitingForConsumer", "False"),
    )
    return _deadline(view, starts, limit_s=limit, known_until=heard[1])


def startup_deadline(view: View) -> Deadline | None:
    """When a job that is not ready, or has never collected frames, fails; None: it has started, or has no limit now.

    The full time starts again when a pod is scheduled, and after a pause. It does not run while pods are unschedulable
    (see `onUnschedulable`), refused by a quota or a server error, or about to be created, nor while a head with a
    ready worker is silent.
    """
    limit, status = view.policy.startup_deadline_seconds, view.job.status
    if not limit or status.start_time is None or is_all_collected(view) or pause_reason(view):
        return None
    if is_waiting_for_room(view) or _is_awaiting_pod(view):
        return None
    head, began, known_until = view.live_head, list[datetime | None](), view.now
    if not view.has_enough:
        needed = (pod for pod in view.examined if pod.role != "canary")
        starting = [pod.starting_since for pod in needed if pod.is_live and not pod.is_ready]
        placed_at = _waited_until(view, "Scheduled", "VolumeOnLostNode", "True")
        began = [since(status, "Ready", "False") or view.now, placed_at, *starting]
    elif has_collected(view):
        return None
    if head is not None and head.is_ready and any(view.ready(group.name) for group in view.groups):
        # Workers may collect: only its answer shows that no frames arrived.
        if view.heard is None:
            return None
        since_then, known_until = view.heard
        began.append(since_then)
    starts = (*began, frames_status(view).last_progress_time, status.start_time, _unpaused_at(view))
    return _deadline(view, starts, limit_s=limit, known_until=known_until)


def _deadline(view: View, starts: Iterable[datetime | None], *, limit_s: float, known_until: datetime) -> Deadline:
    """The status may be arbitrarily old: no deadline starts before this operator began to manage the job."""
    began = max(start for start in (*starts, view.state.led_since) if start is not None)
    return Deadline(at=began + timedelta(seconds=limit_s), known_until=known_until)


def has_collected(view: View) -> bool:
    return frames_status(view).last_progress_time is not None or frames_collected(view) > 0


def _is_awaiting_pod(view: View) -> bool:
    """Whether a missing pod is about to be created, or the head is draining."""
    head = view.live_head
    if head is None:
        return not view.is_refused(view.job.templates.head)
    if head.draining_since is not None:
        return True
    return head.is_ready and any(
        slot.live is None and not view.is_refused(view.job.templates.worker(group))
        for group in view.groups
        for slot in view.wanted_slots(group.name)
    )


def drain_deadline(view: View) -> Deadline | None:
    """When a job with all frames collected is complete although learners have not taken all of them. Time counts only
    while the head answers: a learner may have taken batches during a gap.
    """
    last, heard = frames_status(view).last_progress_time, view.heard
    if last is None or heard is None or not is_all_collected(view):
        return None
    if is_true(view.job.status, "Suspended"):
        return None
    return _deadline(view, (last, heard[0]), limit_s=view.policy.drain_seconds, known_until=heard[1])


# -- the end ---------------------------------------------------------------------------------------------------


def find_outcome(view: View) -> Fact | None:
    """Completed or Failed, if the job ends now."""
    policy, head = view.policy, view.newest_head
    what = "frames" if view.job.spec.collection.episodes is None else "episodes"
    counted = f"{frames_collected(view)} {what} were collected"
    if any(pod.phase == "Succeeded" for pod in view.heads):
        return Fact("Completed", "True", "AllFramesDelivered", f"{counted} and delivered")
    drained = drain_deadline(view)
    if drained is not None and drained.is_over:
        words = f"learners did not acknowledge all of them within drainSeconds ({policy.drain_seconds})"
        return Fact("Completed", "True", "DrainTimedOut", f"{counted}; {words}")
    if head is not None and head.is_failure:
        if head.exit_code == EXIT_REFUSED:
            words = head.message or "it left no termination message; see its log"
            return Fact("Failed", "True", "HeadRefused", f"{head.name} rejected its configuration: {words}"[-1024:])
        failures, limit = failures_after(head), policy.max_head_restarts
        if failures > limit:
            words = f"the head failed {failures} times in a row (maxHeadRestarts {limit}); {how_it_ended(head)}"
            return Fact("Failed", "True", "HeadRestartsExceeded", words)
    limit = policy.max_restarts_per_slot
    for group in view.groups:
        for slot in view.wanted_slots(group.name):
            newest, failures = slot.newest, slot.failures(view.job.templates.worker(group))
            if newest is not None and newest.is_failure and failures > limit:
                words = (
                    f"worker {group.name}-{slot.index} failed {failures} times in a row (maxRestartsPerSlot {limit})"
                )
                return Fact("Failed", "True", "SlotRestartsExceeded", f"{words}; {how_it_ended(newest)}")
    # A suspended or suspending job has no deadlines.
    return None if view.is_stopping else _missed_deadline(view)


def _missed_deadline(view: View) -> Fact | None:
    policy = view.policy
    started, stalled = startup_deadline(view), stall_deadline(view)
    if started is not None and started.is_over:
        trouble = acceptance_trouble(view) or scheduling_trouble(view)
        cause = f": {trouble.message}" if trouble is not None else "; see the events of its pods"
        what = "the job did not become ready again" if has_collected(view) else "no frames were collected"
        words = f"{what} within startupDeadlineSeconds ({policy.startup_deadline_seconds}){cause}"
        return Fact("Failed", "True", "StartupDeadlineExceeded", words)
    late = next((pod for pod in view.examined if is_late(view, pod)), None)
    if policy.on_unschedulable == "Fail" and late is not None:
        limit = f"unschedulableAfterSeconds ({policy.unschedulable_after_seconds})"
        words = f"{late.name} was not scheduled within {limit}: {late.obstacle_message}"
        return Fact("Failed", "True", "Unschedulable", words)
    if policy.on_stall == "Fail" and stalled is not None and stalled.is_over:
        return Fact("Failed", "True", "Stalled", no_progress(view))
    return None


def no_progress(view: View) -> str:
    return f"no frames were collected within progressDeadlineSeconds ({view.policy.progress_deadline_seconds})"


def outcome_dues(view: View) -> Iterator[datetime]:
    """When a deadline may end the job or find it stalled."""
    for deadline in (stall_deadline(view), startup_deadline(view), drain_deadline(view)):
        if deadline is not None:
            # A passed deadline is acted on once the head's next answer confirms it.
            yield deadline.at if deadline.at > view.now else view.after(view.now, view.defaults.poll_s)
    if view.policy.on_unschedulable != "Wait":
        for pod in view.examined:
            if (at := late_at(view, pod)) is not None and at > view.now:
                yield at


def how_it_ended(pod: Pod) -> str:
    """One sentence on how a pod ended, with its termination message."""
    ended = f"exited with code {pod.exit_code}" if pod.exit_code is not None else "ended"
    said = " ".join(pod.message.split())
    words = f": {said[-300:]}" if said else ""
    return f"{pod.name} {ended} ({pod.reason or pod.phase}){words}"
