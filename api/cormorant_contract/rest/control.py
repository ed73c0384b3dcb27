"""Requests of the operator, group sizes and drain; and `/v1/seed`, which restarts environments and random streams."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from cormorant_contract.rest.base import Answer, Count, Number, RequestBody

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
    error: str = ""
    """Why the last change failed; empty if it succeeded."""
    empty_slots: Annotated[dict[str, tuple[Count, ...]], Field(default={})]
    """Skipped indices by group, as requested; groups without any are omitted."""


class DrainReport(Answer):
    """Progress of the drain."""

    draining: bool
    waiting_batches: Count
    lent_batches: Count
    ended: bool


class Reseed(RequestBody):
    """Reseed the fleet."""

    seed: Count
    """Replaces `spec.collection.seed` until this head ends."""


class Seeded(Answer):
    """The workers that were reseeded."""

    seed: Count
    workers: tuple[str, ...]
    """`<group>-<index>`. Later replacements of workers also use this seed."""
