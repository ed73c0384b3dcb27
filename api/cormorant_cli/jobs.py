"""Jobs of a cluster as the API server sends them: their head, their conditions, and words for sentences."""

from datetime import datetime

from cormorant_cli.cluster import Cluster, Raw
from cormorant_contract.children import EPOCH, HEAD, JOB_UID, ROLE


def live_head(cluster: Cluster, job: Raw) -> Raw | None:
    """The pod of the newest head that has neither ended nor been told to end."""
    metadata = job["metadata"]
    heads = cluster.objects("Pod", namespace=metadata["namespace"], labels=f"{JOB_UID}={metadata['uid']},{ROLE}={HEAD}")
    live = (
        pod
        for pod in heads
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Succeeded", "Failed")
    )
    return max(live, key=lambda pod: int(pod["metadata"]["labels"].get(EPOCH) or 0), default=None)


def why_waiting(pod: Raw) -> str:
    """Why a pod does not run: the scheduler's words, or the kubelet's; empty when unknown."""
    status = pod["status"]
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


def age(time: str, now: datetime) -> str:
    """How long ago, as kubectl writes it: 45s, 12m, 3h4m, 5d."""
    seconds = max(0, int((now - datetime.fromisoformat(time)).total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 120:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{days}d"


def identity(job: Raw) -> str:
    """`rl/pong`, for sentences."""
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"
