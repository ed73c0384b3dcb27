"""Errors of the REST API: `application/problem+json` (RFC 9457) with stable types."""

from enum import StrEnum
from typing import Any

from pydantic import ConfigDict

from cormorant_contract.rest.base import Answer, Count, Version

TYPE_PREFIX = "https://cormorant.dev/problems/"


class ProblemType(StrEnum):
    """Last part of the `type` URI. Clients tell errors apart by it, never by the text."""

    MALFORMED_REQUEST = "malformed-request"
    MALFORMED_SAFETENSORS = "malformed-safetensors"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not-found"
    UNKNOWN_MODEL = "unknown-model"
    UNKNOWN_UPDATE = "unknown-update"
    UNKNOWN_WORKER = "unknown-worker"
    UNKNOWN_BATCH = "unknown-batch"
    UNKNOWN_ANNOTATION = "unknown-annotation"
    NO_WEIGHTS = "no-weights"
    VERSION_EXPIRED = "version-expired"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    NOT_ACCEPTABLE = "not-acceptable"
    UPLOAD_STALLED = "upload-stalled"
    VERSION_CONFLICT = "version-conflict"
    BASE_MISMATCH = "base-mismatch"
    ANNOTATIONS_FULL = "annotations-full"
    NOT_PAUSED = "not-paused"
    NO_QUEUE = "no-queue"
    NO_PICTURE = "no-picture"
    STREAM_ENDED = "stream-ended"
    LENGTH_REQUIRED = "length-required"
    TOO_LARGE = "too-large"
    PRECONDITION_FAILED = "precondition-failed"
    PRECONDITION_REQUIRED = "precondition-required"
    RANGE_NOT_SATISFIABLE = "range-not-satisfiable"
    UNSAFE_FORMAT = "unsafe-format"
    UNSUPPORTED_FORMAT = "unsupported-format"
    INVALID_REQUEST = "invalid-request"
    TENSOR_MISMATCH = "tensor-mismatch"
    NOT_FINITE = "not-finite"
    STATE_MISMATCH = "state-mismatch"
    DIGEST_MISMATCH = "digest-mismatch"
    BUSY = "busy"
    DRAINING = "draining"
    NO_WORKERS = "no-workers"
    LAST_WORKER = "last-worker"
    FLEET_FAILED = "fleet-failed"
    STORE_FAILED = "store-failed"
    CONTROL_TIMEOUT = "control-timeout"
    APPLY_TIMEOUT = "apply-timeout"
    INTERNAL = "internal"

    @property
    def uri(self) -> str:
        """The full `type`."""
        return TYPE_PREFIX + self.value


class Differences(Answer):
    """Tensors that do not match the policy: the count of all and the names of at most 20."""

    count: Count
    names: tuple[str, ...]


class FieldError(Answer):
    """One invalid field of a request."""

    field: str
    """Path of the field, e.g. `query.version` or `body.ttl_seconds`."""
    message: str


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
    """What happened, the values, and what to do."""
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
    """Accepted media types or encodings."""
    known: tuple[str, ...] | None = None
    """Known names."""
    retry_after_s: float | None = None
    expected: str | None = None
    got: str | None = None
    missing: Differences | None = None
    unexpected: Differences | None = None
    shape: Differences | None = None
    dtype: Differences | None = None
    errors: tuple[FieldError, ...] | None = None
    role: str | None = None
    """Role that the request needs, with a 403."""

    @property
    def kind(self) -> str:
        """Last part of `type`, to compare with ProblemType; a newer head may send other values."""
        return self.type.removeprefix(TYPE_PREFIX)

    def document(self) -> dict[str, Any]:
        """The JSON document, without members that are None."""
        return self.model_dump(mode="json", exclude_none=True)
