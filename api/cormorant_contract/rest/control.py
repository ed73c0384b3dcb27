"""What the operator asks for: sizes, drain, retirement."""

from typing import Annotated

from pydantic import Field

from cormorant_contract.rest.base import Answer, Count, Request

Replicas = Annotated[int, Field(ge=0, le=65536)]


class Desired(Request):
    """How many workers each group shall have. Groups that are not named stay as they are."""

    groups: Annotated[dict[str, Replicas], Field(min_length=1, max_length=8)]


class DesiredReport(Answer):
    """What is wanted by now."""

    groups: dict[str, Count]
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
