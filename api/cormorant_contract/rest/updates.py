"""`/v1/models`: the models that can be published, and their versions; `/v1/updates`: progress of a publish.

staged -> applying -> applied
                   -> partially_applied (some workers are late) -> applied
                   -> failed (no worker acknowledged in time, or all refused)
                   -> superseded (replaced by a newer version of the same models)
"""

from typing import Literal

from cormorant_contract.rest.base import Answer, Count, Millis, RequestBody, Time, Version

UpdateState = Literal["staged", "applying", "applied", "partially_applied", "failed", "superseded"]
ReceiptState = Literal["waiting", "applied", "refused", "lost"]
FINAL_STATES = frozenset({"applied", "failed", "superseded"})
"""States that end a wait for an update."""


class WorkerCounts(Answer):
    """Workers that acknowledged or refused an update."""

    total: Count
    acked: Count
    failed: Count


class UpdateReceipt(Answer):
    """One worker's receipt."""

    worker: str
    version: Version
    """Version that the worker uses: this one or a newer one."""
    state: ReceiptState
    latency_ms: Millis | None = None
    """From the last byte of the request to the worker's receipt."""
    error: str = ""


class UpdateTimings(Answer):
    """Duration of each stage."""

    receive_ms: Millis = 0
    verify_ms: Millis = 0
    distribute_ms: Millis = 0
    apply_ms: Millis | None = None
    """From handing the weights to the fleet to the last worker's receipt."""


class Update(Answer):
    """A publish and its receipts."""

    update_id: str
    model: str
    """Published model; the first by name if there are several."""
    models: tuple[str, ...]
    """Published models, by name."""
    version: Version
    digest: str
    """Digest of the request body: `xxh3:` and 32 hex digits."""
    etag: str
    bytes: Count
    tensors: Count
    state: UpdateState
    workers: WorkerCounts
    receipts: tuple[UpdateReceipt, ...]
    """Receipts by worker. Kept for the last 100 publishes of this head."""
    slowest_ms: Millis | None = None
    """From the last byte of the request to the latest receipt so far."""
    superseded_by: Version | None = None
    error: str = ""
    warning: str = ""
    """A problem that did not prevent the publish, e.g. that it could not be written to disk."""
    staged_at: Time
    applied_at: Time | None = None
    timings: UpdateTimings


class ModelSummary(Answer):
    """One named model of the policy."""

    name: str
    version: Version
    """Newest published version of this model; 0: it still uses its initial weights."""
    digest: str = ""
    """`xxh3:` and 32 hex digits of the published file; empty before the first publish."""
    etag: str = ""
    bytes: Count = 0
    """Size of the published file."""
    num_tensors: Count


class Models(Answer):
    """Every named model."""

    models: tuple[ModelSummary, ...]
    version: Version
    """Newest published version of any model."""


class VersionEntry(Answer):
    """One retained version of a model."""

    version: Version
    digest: str
    etag: str
    bytes: Count
    published_at: Time
    author: str
    """Role and address of the publisher."""


class Versions(Answer):
    """Retained versions, newest first."""

    model: str
    versions: tuple[VersionEntry, ...]


class Rollback(RequestBody):
    """Publish the weights of a retained version again, under a new version number."""

    version: Version
