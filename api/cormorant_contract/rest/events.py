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
]


class Event(Answer):
    """Something that happened. Fields that say nothing are empty or 0."""

    id: str
    """Send the last one seen as `Last-Event-ID` to go on after it."""
    kind: EventKind | str
    time: Time
    worker: str = ""
    version: int = 0
    frames: int = 0
    update_id: str = ""
    state: str = ""
    """Of an update: its state."""
    reason: str = ""
