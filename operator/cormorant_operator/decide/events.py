"""Kubernetes Events: what changed from one status to the next. Losing an event is harmless."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from cormorant_contract.job import API_VERSION, KIND
from cormorant_contract.status import CollectorJobStatus
from cormorant_operator import names
from cormorant_operator.decide.plan import JobEvent
from cormorant_operator.job import Identity, find

_WARNINGS = {("Accepted", "False"), ("Stalled", "True"), ("Failed", "True")}
_NEWS = {
    *_WARNINGS,
    ("Ready", "True"),
    ("Paused", "True"),
    ("Suspended", "True"),
    ("Completed", "True"),
    ("Updating", "True"),
    ("Progressing", "Unknown"),
}
_QUEUED = ("WaitingForQuota", "Evicted")
_BLOCKED = (
    "Unschedulable",
    "QuotaExceeded",
    "ImagePull",
    "ContainerConfig",
    "ApiServerError",
    "UnknownFields",
    "UnplayedVariants",
    "HeadBlocked",
    "EnvironmentsFailing",
    "WeightsMissing",
    "VolumeOnLostNode",
)


def events_between(before: CollectorJobStatus, after: CollectorJobStatus) -> Iterator[JobEvent]:
    if after.epoch > before.epoch:
        yield JobEvent(reason="HeadCreated", message=f"created the head of epoch {after.epoch}")
    sizes = {group.name: group.desired for group in before.groups}
    for group in after.groups:
        if (size := sizes.get(group.name, group.desired)) != group.desired:
            yield JobEvent(reason="Scaled", message=f"group {group.name}: from {size} to {group.desired} workers")
    known = {failure.pod for failure in before.recent_failures}
    for failure in after.recent_failures:
        if failure.pod not in known:
            code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
            words = f": {failure.message}" if failure.message else ""
            yield JobEvent(reason="PodFailed", message=f"{failure.pod}: {failure.reason}{code}{words}", is_warning=True)
    for condition in after.conditions:
        old = find(before, condition.type)
        is_same = old is not None and (old.status, old.reason) == (condition.status, condition.reason)
        is_news = (condition.type, condition.status) in _NEWS or condition.reason in (*_BLOCKED, *_QUEUED)
        if is_news and not is_same:
            yield JobEvent(
                # "Spec" or "API" alone would not say what happened.
                reason="Paused" if condition.type == "Paused" else condition.reason,
                message=condition.message or f"{condition.type} is {condition.status}",
                is_warning=(condition.type, condition.status) in _WARNINGS or condition.reason in _BLOCKED,
            )


_MAX_MESSAGE = 1024


def event(job: Identity, note: JobEvent, *, at: datetime) -> dict[str, Any]:
    """An Event as JSON. Two operators that report the same in the same second create the same Event."""
    time = at.replace(microsecond=0).isoformat().replace("+00:00", "Z")
    key = names.digest(job.uid, note.reason, note.message, time)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{key}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "reason": note.reason,
        "message": note.message[:_MAX_MESSAGE],
        "type": "Warning" if note.is_warning else "Normal",
        "source": {"component": names.MANAGER},
        "reportingComponent": names.MANAGER,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
