"""Events: what people read in `kubectl describe`. Losing one is no harm."""

from datetime import datetime
from typing import Any

from cormorant_contract.job import API_VERSION, KIND
from cormorant_operator import names
from cormorant_operator.job import Identity
from cormorant_operator.plan import Note

_LONGEST = 1024


def event(identity: Identity, note: Note, *, at: datetime) -> dict[str, Any]:
    """One Event. Two operators that tell the same at the same second make the same one."""
    time = at.replace(microsecond=0).isoformat().replace("+00:00", "Z")
    key = names.digest(identity.uid, note.reason, note.message, time)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{identity.name}.{key}", "namespace": identity.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": identity.name,
            "namespace": identity.namespace,
            "uid": identity.uid,
        },
        "reason": note.reason,
        "message": note.message[:_LONGEST],
        "type": "Warning" if note.is_warning else "Normal",
        "source": {"component": names.MANAGER},
        "reportingComponent": names.MANAGER,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
