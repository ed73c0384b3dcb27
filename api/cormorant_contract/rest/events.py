"""`/v1/events`: server-sent events. Each has an id, an `event` (the kind) and one JSON object as data."""

from typing import Literal

from cormorant_contract.rest.base import Answer, Time

EventKind = Literal[
    "published",
    "applied",
    "update",
    "worker_ready",
    "worker_lost",
    "accepted",
    "dropped",
    "paused",
    "resumed",
    "seeded",
    "draining",
    "failed",
    "ended",
    "weights_missing",
]


class Event(Answer):
    """One event. Fields that do not apply are empty or 0."""

    id: str
    """Send the last id you saw as `Last-Event-ID` to resume after it."""
    kind: EventKind | str
    time: Time
    worker: str = ""
    version: int = 0
    frames: int = 0
    update_id: str = ""
    state: str = ""
    """State of the update, for `update` events. For `ended`, the last event of a head: Completed; Failed, with the
    reason; or Stopped, when another head may continue the job.
    """
    reason: str = ""
