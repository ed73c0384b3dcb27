"""Jobs as the API server returns them: conditions, and phrases for messages."""

from datetime import datetime

from cormorant_cli.cluster import Raw


def condition(raw: Raw, kind: str) -> Raw:
    """One of an object's conditions; empty if it was never written."""
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return next((dict(found) for found in conditions if found.get("type") == kind), {})


def holds(job: Raw, kind: str) -> bool:
    return condition(job, kind).get("status") == "True"


def is_current(job: Raw) -> bool:
    """Whether the operator has seen the newest spec."""
    status = job.get("status") or {}
    return int(status.get("observedGeneration") or 0) >= int(job["metadata"].get("generation") or 0)


def why(fact: Raw) -> str:
    """A condition's reason and message, as the end of a message."""
    message = str(fact.get("message") or "").strip()
    return f"{fact.get('reason', '')}{f': {message}' if message else ''}"


def age(time: str, now: datetime) -> str:
    """Age in kubectl's format: 45s, 12m, 3h4m, 5d."""
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
    """`rl/pong`, for messages."""
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"
