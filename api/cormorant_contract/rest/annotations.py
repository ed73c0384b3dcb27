"""`/v1/annotations`: small values that a learner keeps at the head, each for one policy version."""

from typing import Annotated

from pydantic import Field

from cormorant_contract.rest.base import Answer, Count, Time, Version

MAX_ANNOTATION_BYTES = 1 << 20
"""Longest value."""
MAX_ANNOTATION_KEYS = 64
MAX_ANNOTATIONS_BYTES = 64 << 20
"""Bytes of all values together that one head retains."""

AnnotationKey = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class AnnotationEntry(Answer):
    """One value without its bytes."""

    key: str
    version: Version
    """Policy version that the value belongs to; it may be one that is not published yet."""
    digest: str
    """`xxh3:` and 32 hex digits of the value."""
    etag: str
    bytes: Count
    stored_at: Time
    author: str
    """Role and address of the writer."""


class AnnotationList(Answer):
    """The newest value of every key, in the order of the keys."""

    annotations: tuple[AnnotationEntry, ...]
    keeps: Count
    """Versions that are retained per key."""
