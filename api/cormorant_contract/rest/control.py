"""`/v1/pauses`: who pauses the fleet, and for how long; the operator's group sizes and drain; `/v1/seed`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cormorant_contract.rest.base import Answer, Count, Name, Number, RequestBody, Time

LONGEST_WAIT_S = 300.0
"""Longest wait that a client may request."""

PauseState = Literal["running", "draining", "paused"]
"""draining: pause requested, some workers still step."""


class PauseRequest(RequestBody):
    """Request a pause lease. A second request of the same owner renews its lease."""

    owner: Name = "default"
    """Owner of the lease. Each owner holds at most one."""
    reason: Annotated[str, Field(max_length=1024)] = ""
    mode: Literal["now"] = "now"
    """now: stop at the next vector step. Open batches are kept and continue after the resume."""
    ttl_seconds: Annotated[float, Number, Field(gt=0, le=24 * 3600)] = 300
    """Seconds after which the lease expires, so that an owner that died does not block the job."""
    wait_seconds: Annotated[float, Number, Field(ge=0, le=int(LONGEST_WAIT_S))] = 30
    """Seconds to wait for every worker to stop before the response is sent."""


class PauseLease(Answer):
    """One owner's pause lease."""

    id: str
    owner: str
    reason: str
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


Replicas = Annotated[int, Number, Field(ge=0, le=65536)]
Index = Annotated[int, Number, Field(ge=0, le=65535)]


class Desired(RequestBody):
    """Desired number of workers per group, and whether the job is paused. Omitted fields keep their value."""

    groups: Annotated[dict[str, Replicas], Field(default={}, max_length=8)]
    paused: bool | None = None
    """Current value of the job's `spec.paused`. Pause leases apply in addition."""
    empty_slots: Annotated[dict[str, tuple[Index, ...]], Field(default={}, max_length=8)]
    """Indices by group that stay without a worker; the group's workers take the lowest other indices. Groups that are
    not named skip none.
    """

    @model_validator(mode="after")
    def _is_about_something(self) -> Self:
        if not self.groups and self.paused is None:
            raise ValueError("groups and paused are both missing; send at least one of them")
        if unsized := sorted(set(self.empty_slots) - set(self.groups)):
            raise ValueError(f"empty_slots names {', '.join(unsized)} and groups does not; send the group's size too")
        return self


class DesiredReport(Answer):
    """Desired sizes and pause, as the head has them."""

    groups: dict[str, Count]
    paused: bool
    """`spec.paused`, as last sent to the head."""
    pending: bool
    """True while workers are being retired."""
    empty_slots: Annotated[dict[str, tuple[Count, ...]], Field(default={})]
    """Skipped indices by group, as requested; groups without any are omitted."""


class Reseed(RequestBody):
    """Reseed the fleet."""

    seed: Count
    """Replaces `spec.collection.seed` until this head ends."""


class Seeded(Answer):
    """The workers that were reseeded."""

    seed: Count
    workers: tuple[str, ...]
    """`<group>-<index>`. Later replacements of workers also use this seed."""
