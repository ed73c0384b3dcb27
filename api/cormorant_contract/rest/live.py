"""`/v1/live`: server-sent events for pages that watch a job. Each kind carries one JSON object as data:

hello      -> Hello     once: what this listener may do
opening    -> Opening   once, and again after a listener fell behind: what was
moment     -> Moment    every second: what is, the same bytes for all listeners
bye        -> Bye       the head ends
"""

from typing import Literal

from cormorant_contract.rest.base import Answer, Count, Time
from cormorant_contract.rest.events import Event
from cormorant_contract.rest.status import Status, Worker
from cormorant_contract.rest.updates import UpdateSummary


class Hello(Answer):
    """What this listener may do."""

    role: Literal["read", "write", "operator"]
    """What its token proves; "operator" where the head has no tokens."""


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


class History(Answer):
    """The last quarter of an hour, a sample a second: arrays of one length, oldest first."""

    at: tuple[float, ...] = ()
    """Seconds since 1970, in UTC."""
    per_second: tuple[float, ...] = ()
    """Frames stepped per second."""
    mean_return: tuple[float | None, ...] = ()
    """Of the last episodes, 100 at most; None before the first one ended."""


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


class Bye(Answer):
    """The head ends, or is replaced."""

    reason: str = ""
    """Why the fleet cannot go on, if that is it."""
