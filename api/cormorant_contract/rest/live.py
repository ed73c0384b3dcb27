"""`/v1/events`: server-sent events, each with an id, an `event` (the kind) and one JSON object as data.

`/v1/live`: server-sent events for pages that watch a job. Each kind carries one JSON object as data:

hello      -> Hello     once: the listener's role
opening    -> Opening   once, and again after a listener fell behind: history and current state
moment     -> Moment    every second: current state, the same bytes for all listeners
bye        -> Bye       the head shuts down
"""

from typing import Literal

from pydantic import Field

from cormorant_contract.rest.base import Answer, Count, Time
from cormorant_contract.rest.status import Status, Worker
from cormorant_contract.rest.updates import Update

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


class Hello(Answer):
    """Permissions of this listener."""

    role: Literal["read", "write", "operator"]
    """Role of its token; "operator" if the head runs without tokens."""


class Sample(Answer):
    """One point of the plots."""

    at: float
    """Seconds since 1970, in UTC."""
    per_second: float
    """Frames stepped per second."""
    mean_return: float | None = None
    """Mean return of the last episodes (at most 100); None before the first one ended."""
    return_low: float | None = None
    """First decile of those returns; None while there are fewer than five."""
    return_high: float | None = None
    """Ninth decile of those returns."""
    mean_length: float | None = None
    """Mean length of the same episodes, in frames."""
    staleness: float = 0
    """Versions by which the slowest worker lags behind the newest published one."""
    time_shares: dict[str, float] = Field(default_factory=dict)
    """Share of the workers' time since the last sample by activity; sums to 1, or empty."""


class LogLine(Answer):
    """One line of the head's log."""

    number: Count
    """Line number, from 0 in each head."""
    time: Time
    level: str
    text: str


class Moment(Answer):
    """State of the whole job at one moment."""

    time: Time
    status: Status
    spec_paused: bool
    """True while `spec.paused` pauses the job, regardless of leases."""
    workers: tuple[Worker, ...] | None = None
    """Every worker; None: unchanged since the last list. Lists of more than 100 workers are not sent every second."""
    updates: tuple[Update, ...] = ()
    """The latest publishes of this head, newest first, without receipts: they are at `/v1/updates/{id}`."""
    events: tuple[Event, ...] = ()
    """Events since the last moment, oldest first, without those of every batch (`accepted`, `applied`, `dropped`).
    An event may be sent twice; deduplicate by id.
    """
    sample: Sample | None = None
    """The newest point of the plots."""
    logs: tuple[LogLine, ...] = ()
    """Lines of the head's log since the last moment, oldest first. A line may be sent twice; deduplicate by number."""


class History(Answer):
    """The whole run in at most 2,100 samples, with one per second for the last 15 minutes. Arrays of equal length,
    oldest first; fields as in Sample.
    """

    at: tuple[float, ...] = ()
    per_second: tuple[float, ...] = ()
    mean_return: tuple[float | None, ...] = ()
    return_low: tuple[float | None, ...] = ()
    return_high: tuple[float | None, ...] = ()
    mean_length: tuple[float | None, ...] = ()
    staleness: tuple[float, ...] = ()
    time_shares: tuple[dict[str, float], ...] = ()


class Opening(Answer):
    """History of the run and its current state."""

    num_envs: Count
    """Environments per worker."""
    picture: bool
    """Whether observations are images: `/v1/workers/{worker}/picture`."""
    history: History
    moment: Moment
    manifest: str = ""
    """The CollectorJob that this head runs, as YAML."""


class Bye(Answer):
    """The head shuts down or is replaced."""

    state: str = ""
    """Completed, Failed or Stopped; empty if only this stream ends."""
    reason: str = ""
    """The failure that ended the fleet; empty if it did not fail."""
