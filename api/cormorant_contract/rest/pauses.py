"""`/v1/pauses`: who pauses the fleet, and for how long."""

import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cormorant_contract.rest.base import Answer, Name, Number, RequestBody, Time

LONGEST_TTL_S = 24 * 3600
LONGEST_WAIT_S = 300.0
"""Longest wait that a client may request."""

PauseState = Literal["running", "draining", "paused"]
"""draining: pause requested, some workers still step."""
TtlSeconds = Annotated[float, Number, Field(gt=0, le=LONGEST_TTL_S)]
WaitSeconds = Annotated[float, Number, Field(ge=0, le=int(LONGEST_WAIT_S))]


def _printable(text: str) -> str:
    """The text is printed on terminals, which obey control characters."""
    if odd := next((c for c in text if unicodedata.category(c) == "Cc"), ""):
        raise ValueError(f"contains the control character {odd!r}; remove it")
    return text


class PauseRequest(RequestBody):
    """Request a pause lease. A second request of the same owner renews its lease."""

    owner: Name = "default"
    """Owner of the lease. Each owner holds at most one."""
    reason: Annotated[str, Field(max_length=1024), AfterValidator(_printable)] = ""
    mode: Literal["now"] = "now"
    """now: stop at the next vector step. Open batches are kept and continue after the resume."""
    ttl_seconds: TtlSeconds = 300
    """Seconds after which the lease expires, so that an owner that died does not block the job."""
    wait_seconds: WaitSeconds = 30
    """Seconds to wait for every worker to stop before the response is sent."""


class PauseLease(Answer):
    """One owner's pause lease."""

    id: str
    owner: str
    reason: str
    mode: Literal["now"]
    created_at: Time
    expires_at: Time
    state: PauseState
    """State of the whole fleet when the response was written."""


class Pauses(Answer):
    """All leases. The fleet is paused while a lease is held or the job's `spec.paused` is true."""

    state: PauseState
    spec_paused: bool
    leases: tuple[PauseLease, ...]
    error: str = ""
    """Why the fleet could not be paused or resumed; empty if it was."""


class ResumeRequest(RequestBody):
    """End the pause lease of one owner."""

    owner: Name = "default"
