"""What the operator asks for: sizes, drain, retirement."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from cormorant_contract.rest.base import Answer, Count, Number, Request

Replicas = Annotated[int, Number, Field(ge=0, le=65536)]
Index = Annotated[int, Number, Field(ge=0, le=65535)]


class Desired(Request):
    """How many workers each group is to have, and whether they are to stand still. What is not named stays as it is."""

    groups: Annotated[dict[str, Replicas], Field(default={}, max_length=8)]
    paused: bool | None = None
    """The job's `spec.paused`, as it is now; leases hold the fleet besides."""
    empty_slots: Annotated[dict[str, tuple[Index, ...]], Field(default={}, max_length=8)]
    """Slots by group that no worker is expected in: the group's workers have the lowest other indices. A group that is
    not named here has none, and its workers have the lowest indices. Heads whose report lacks it refuse it."""

    @model_validator(mode="after")
    def _is_about_something(self) -> Self:
        if not self.groups and self.paused is None:
            raise ValueError("groups and paused are both missing; send at least one of them")
        if unsized := sorted(set(self.empty_slots) - set(self.groups)):
            raise ValueError(f"empty_slots names {', '.join(unsized)} and groups does not; send the group's size too")
        return self


class DesiredReport(Answer):
    """What is wanted by now."""

    groups: dict[str, Count]
    paused: bool
    """`spec.paused`, as the head knows it."""
    pending: bool
    """Workers are being started or retired."""
    error: str = ""
    """Why the last change failed, if it did."""
    empty_slots: dict[str, tuple[Count, ...]] | None = None
    """As they were asked for; groups without any are left out. None: an older head, which knows sizes alone."""


class DrainReport(Answer):
    """How far the drain is."""

    draining: bool
    waiting_batches: Count
    lent_batches: Count
    ended: bool


class Retirement(Answer):
    """A worker that goes."""

    worker: str
    detail: str
