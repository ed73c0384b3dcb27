"""Jobs of a cluster and what belongs to them, as commands look for them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cormorant_cli.cluster import Cluster, Raw
from cormorant_contract.children import EPOCH, GROUP, HEAD, INDEX, JOB_UID, ROLE, WORKER


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPod:
    name: str
    role: str
    slot: str
    """`<group>-<index>` of a worker; empty for a head."""
    epoch: int
    """Epoch of a head; 0 for a worker."""
    phase: str
    is_ready: bool
    is_terminating: bool
    has_started: bool
    """Its container runs or ran: there is a log."""
    created: datetime
    raw: Raw

    @property
    def is_live(self) -> bool:
        """Neither ended nor told to end."""
        return not self.is_terminating and self.phase not in ("Succeeded", "Failed")

    @property
    def order(self) -> tuple[int, int, str, int, datetime]:
        """Heads first, newest first; then workers by group and index, newest first."""
        group, _, index = self.slot.rpartition("-")
        age = datetime.now(UTC) - self.created
        return (self.role != HEAD, -self.epoch, group, int(index or 0), datetime.min.replace(tzinfo=UTC) + age)


def pods_of(cluster: Cluster, job: Raw) -> list[JobPod]:
    """The pods of a job: heads first, then workers, in each place the newest first."""
    metadata = job["metadata"]
    found = cluster.objects("Pod", namespace=metadata["namespace"], labels=f"{JOB_UID}={metadata['uid']}")
    return sorted(map(read_pod, found), key=lambda pod: pod.order)


def read_pod(raw: Raw) -> JobPod:
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
    return JobPod(
        name=metadata["name"],
        role=labels.get(ROLE, ""),
        slot=f"{labels.get(GROUP, '')}-{labels.get(INDEX, '')}" if labels.get(ROLE) == WORKER else "",
        epoch=int(labels.get(EPOCH) or 0),
        phase=status.get("phase", "Pending"),
        is_ready=any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        ),
        is_terminating="deletionTimestamp" in metadata,
        has_started=status.get("phase") == "Running"
        or any("running" in state or "terminated" in state for state in states),
        created=read_time(metadata["creationTimestamp"]),
        raw=raw,
    )


def live_head(pods: Iterable[JobPod]) -> JobPod | None:
    return next((pod for pod in pods if pod.role == HEAD and pod.is_live), None)


def why_waiting(pod: JobPod) -> str:
    """Why a pod does not run: the scheduler's words, or the kubelet's; empty when unknown."""
    status = pod.raw.get("status") or {}
    for fact in status.get("conditions") or ():
        if fact.get("type") == "PodScheduled" and fact.get("status") == "False":
            return f"{fact.get('reason', '')}: {fact.get('message', '')}".strip(": ")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message') or container.get('image', '')}"
    return ""


def condition(raw: Raw, kind: str) -> Raw:
    """One of an object's conditions; empty when nothing has written it."""
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return next((dict(found) for found in conditions if found.get("type") == kind), {})


def holds(job: Raw, kind: str) -> bool:
    return condition(job, kind).get("status") == "True"


def is_current(job: Raw) -> bool:
    """Whether the operator has seen the newest spec."""
    status = job.get("status") or {}
    return int(status.get("observedGeneration") or 0) >= int(job["metadata"].get("generation") or 0)


def why(fact: Raw) -> str:
    """A condition's reason and message, as the end of a sentence."""
    message = str(fact.get("message") or "").strip()
    return f"{fact.get('reason', '')}{f': {message}' if message else ''}"


def read_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def age(then: datetime, now: datetime) -> str:
    """How long ago, as kubectl writes it: 45s, 12m, 3h4m, 5d."""
    seconds = max(0, int((now - then).total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 120:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{days}d"


def name_of(job: Raw) -> str:
    """`collectorjob.cormorant.dev/pong`: what other tools take."""
    return f"collectorjob.cormorant.dev/{job['metadata']['name']}"


def identity(job: Raw) -> str:
    """`rl/pong`, for sentences."""
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


def strip(raw: Raw) -> dict[str, Any]:
    """An object without the book-keeping."""
    metadata = {key: value for key, value in raw["metadata"].items() if key != "managedFields"}
    return {**raw, "metadata": metadata}
