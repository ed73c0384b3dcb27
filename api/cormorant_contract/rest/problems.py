"""Errors of the REST API: `application/problem+json` (RFC 9457) with stable types."""

from enum import StrEnum
from typing import Self

from pydantic import ConfigDict

from cormorant_contract.rest.base import Answer, Count, Version

TYPE_PREFIX = "https://cormorant.dev/problems/"


class ProblemType(StrEnum):
    """Last part of the `type` URI, and the HTTP status. Clients tell errors apart by it, never by the text."""

    _value_: str
    status: int

    MALFORMED_REQUEST = "malformed-request", 400
    MALFORMED_SAFETENSORS = "malformed-safetensors", 400
    UNAUTHENTICATED = "unauthenticated", 401
    FORBIDDEN = "forbidden", 403
    NOT_FOUND = "not-found", 404
    UNKNOWN_MODEL = "unknown-model", 404
    UNKNOWN_UPDATE = "unknown-update", 404
    UNKNOWN_WORKER = "unknown-worker", 404
    UNKNOWN_BATCH = "unknown-batch", 404
    NO_WEIGHTS = "no-weights", 404
    VERSION_EXPIRED = "version-expired", 404
    METHOD_NOT_ALLOWED = "method-not-allowed", 405
    UPLOAD_STALLED = "upload-stalled", 408
    VERSION_CONFLICT = "version-conflict", 409
    NOT_PAUSED = "not-paused", 409
    NO_QUEUE = "no-queue", 409
    NO_PICTURE = "no-picture", 409
    STREAM_ENDED = "stream-ended", 410
    LENGTH_REQUIRED = "length-required", 411
    TOO_LARGE = "too-large", 413
    PRECONDITION_FAILED = "precondition-failed", 412
    UNSAFE_FORMAT = "unsafe-format", 415
    UNSUPPORTED_FORMAT = "unsupported-format", 415
    INVALID_REQUEST = "invalid-request", 422
    TENSOR_MISMATCH = "tensor-mismatch", 422
    NOT_FINITE = "not-finite", 422
    STATE_MISMATCH = "state-mismatch", 422
    BUSY = "busy", 429
    DRAINING = "draining", 503
    NO_WORKERS = "no-workers", 503
    OVERLOADED = "overloaded", 503
    LAST_WORKER = "last-worker", 409
    FLEET_FAILED = "fleet-failed", 503
    STORE_FAILED = "store-failed", 503
    CONTROL_TIMEOUT = "control-timeout", 504
    APPLY_TIMEOUT = "apply-timeout", 504
    INTERNAL = "internal", 500

    def __new__(cls, value: str, status: int) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.status = value, status
        return member

    @property
    def uri(self) -> str:
        """The full `type`."""
        return TYPE_PREFIX + self.value


class Differences(Answer):
    """Tensors that do not match the policy: the count of all and the names of at most 20."""

    count: Count
    names: tuple[str, ...]


class Problem(Answer):
    """Body of every error response. Members after `instance` are present only where they apply."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "type": TYPE_PREFIX + ProblemType.VERSION_CONFLICT,
                "title": "Version conflict",
                "status": 409,
                "detail": "version 6 is not newer than 7; publish a higher version or omit it",
                "current_version": 7,
            }
        },
    )

    type: str
    """A URI that never changes; its last part is one of ProblemType."""
    title: str
    """The type in words."""
    status: int
    """The HTTP status."""
    detail: str = ""
    """The failure, the values, and the remedy."""
    instance: str = ""
    """Path of the request."""
    current_version: Version | None = None
    current_etag: str | None = None
    oldest_retained: Version | None = None
    update_id: str | None = None
    offset: Count | None = None
    """Byte offset of the first malformed byte."""
    limit_bytes: Count | None = None
    accepted: tuple[str, ...] | None = None
    """Accepted media types."""
    known: tuple[str, ...] | None = None
    """Known names."""
    retry_after_s: float | None = None
    missing: Differences | None = None
    unexpected: Differences | None = None
    shape: Differences | None = None
    dtype: Differences | None = None
    role: str | None = None
    """Role that the request needs, with a 403."""

    @property
    def kind(self) -> str:
        """Last part of `type`, to compare with ProblemType; a newer head may send other values."""
        return self.type.removeprefix(TYPE_PREFIX)
