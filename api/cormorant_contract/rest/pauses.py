"""`/v1/pauses`: who wants the fleet to stand still, and for how long."""

import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cormorant_contract.rest.base import Answer, Name, Number, Request, Time

LONGEST_TTL_S = 24 * 3600
LONGEST_WAIT_S = 300

PauseState = Literal["running", "draining", "paused"]
"""draining: asked to stop, and not every worker has."""
TtlSeconds = Annotated[float, Number, Field(gt=0, le=LONGEST_TTL_S)]
WaitSeconds = Annotated[float, Number, Field(ge=0, le=LONGEST_WAIT_S)]


def _printable(text: str) -> str:
    """Others read it on their terminals, which obey control characters."""
    if odd := next((c for c in text if unicodedata.category(c) == "Cc"), ""):
        raise ValueError(f"the control character {odd!r} is in it; write it without")
    return text


class PauseRequest(Request):
    """Ask for a lease. The same owner asking again renews the one it holds."""

    owner: Name = "default"
    """Who pauses; one lease each."""
    reason: Annotated[str, Field(max_length=1024), AfterValidator(_printable)] = ""
    mode: Literal["now"] = "now"
    """now: stop at the next vector step; batches under way are kept and go on at resume."""
    ttl_seconds: TtlSeconds = 300
    """The lease ends by itself after so long: an owner that died does not hold up the job for ever."""
    wait_seconds: WaitSeconds = 30
    """Answer when every worker stands still, or after so long."""


class PauseLease(Answer):
    """One owner's pause."""

    id: str
    owner: str
    reason: str
    mode: Literal["now"]
    created_at: Time
    expires_at: Time
    state: PauseState
    """Of the whole fleet, when this was written."""


class Pauses(Answer):
    """All leases. The fleet is paused while there is one, or while the job's `spec.paused` is true."""

    state: PauseState
    spec_paused: bool
    leases: tuple[PauseLease, ...]
    error: str = ""
    """Why the fleet is not where it should be, if so."""


class ResumeRequest(Request):
    """End the lease of an owner."""

    owner: Name = "default"
