"""`/v1/live`: server-sent events for pages that watch a job. Each kind carries one JSON object as data:

hello      -> Hello     once: what this listener may do
opening    -> Opening   once, and again after a listener fell behind: what was
moment     -> Moment    every second: what is, the same bytes for all listeners
bye        -> Bye       the head ends
"""

from typing import Literal

from pydantic import Field

from cormorant_contract.rest.base import Answer, Count, Time
from cormorant_contract.rest.events import Event
from cormorant_contract.rest.status import Status, Worker
from cormorant_contract.rest.updates import UpdateSummary


class Hello(Answer):
    """What this listener may do."""

    role: Literal["read", "write", "operator"]
    """What its token proves; "operator" where the head has no tokens."""


class Sample(Answer):
    """One point of the plots."""

    at: float
    """Seconds since 1970, in UTC."""
    per_second: float
    """Frames stepped per second."""
    mean_return: float | None = None
    """Of the last episodes, 100 at most; None before the first one ended."""
    return_low: float | None = None
    """First decile of those returns; None while there are fewer than five."""
    return_high: float | None = None
    """Ninth decile of those returns."""
    mean_length: float | None = None
    """Frames, of the same episodes."""
    staleness: float = 0
    """Published policy versions that the slowest worker is behind."""
    time_shares: dict[str, float] = Field(default_factory=dict)
    """How the workers spent the time since the last sample, by activity; the values sum to 1, or it is empty."""


class LogLine(Answer):
    """One line of the head's log."""

    number: Count
    """Counts up from 0 in each head."""
    time: Time
    level: str
    text: str


class Moment(Answer):
    """The whole job at one moment."""

    time: Time
    status: Status
    spec_paused: bool
    """The manifest pauses the job, whatever the leases say."""
    workers: tuple[Worker, ...] | None = None
    """Every worker; None: as they were told last. More than a hundred are not told every second."""
    updates: tuple[UpdateSummary, ...] = ()
    """The newest publishes of this head, newest first; receipts are at `/v1/updates/{id}`."""
    events: tuple[Event, ...] = ()
    """What happened since the last moment, oldest first, without what comes with every batch (`accepted`, `applied`,
    `dropped`). An event may come twice; its id says so.
    """
    sample: Sample | None = None
    """The newest point of the plots."""
    logs: tuple[LogLine, ...] = ()
    """Lines of the head's log since the last moment, oldest first. A line may come twice; its number says so."""


class History(Answer):
    """The whole run in at most 2,100 samples, the last quarter of an hour with one a second: arrays of one length, the
    oldest first. Fields as in Sample.
    """

    at: tuple[float, ...] = ()
    per_second: tuple[float, ...] = ()
    mean_return: tuple[float | None, ...] = ()
    return_low: tuple[float | None, ...] = ()
    return_high: tuple[float | None, ...] = ()
    mean_length: tuple[float | None, ...] = ()
    staleness: tuple[float, ...] = ()
    time_shares: tuple[dict[str, float], ...] = ()


class PictureSize(Answer):
    """What `/v1/workers/{worker}/picture` shows, in pixels."""

    height: Count
    width: Count


class Opening(Answer):
    """What a listener has missed."""

    num_envs: Count
    """Environments of each worker."""
    picture: PictureSize | None
    """None: observations are not pictures."""
    history: History
    moment: Moment
    manifest: str = ""
    """The CollectorJob that this head runs, in YAML."""


class Bye(Answer):
    """The head ends, or is replaced."""

    reason: str = ""
    """Why the fleet cannot go on, if that is it."""
