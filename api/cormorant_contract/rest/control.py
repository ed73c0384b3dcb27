"""What the operator asks for: sizes, drain, retirement."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from cormorant_contract.rest.base import Answer, Count, Number, Request

Replicas = Annotated[int, Number, Field(ge=0, le=65536)]


class Desired(Request):
    """How many workers each group is to have, and whether they are to stand still. What is not named stays as it is."""

    groups: Annotated[dict[str, Replicas], Field(default={}, max_length=8)]
    paused: bool | None = None
    """The job's `spec.paused`, as it is now; leases hold the fleet besides."""

    @model_validator(mode="after")
    def _is_about_something(self) -> Self:
        if not self.groups and self.paused is None:
            raise ValueError("groups and paused are both missing; send at least one of them")
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
