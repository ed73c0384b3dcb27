"""`/v1/updates`: what became of a publish.

staged -> applying -> applied
                   -> partially_applied (some workers are late) -> applied
                   -> failed (nobody acknowledged in time, or all refused)
                   -> superseded (a newer version of the same models came first)
"""

from typing import Literal

from cormorant_contract.rest.base import Answer, Count, Millis, Time, Version

UpdateState = Literal["staged", "applying", "applied", "partially_applied", "failed", "superseded"]
ReceiptState = Literal["waiting", "applied", "refused", "lost"]
FINAL_STATES = frozenset({"applied", "failed", "superseded"})
"""A wait for an update ends with these."""


class WorkerCounts(Answer):
    """How far an update is."""

    total: Count
    acked: Count
    failed: Count


class UpdateReceipt(Answer):
    """One worker's answer."""

    worker: str
    version: Version
    """The version that the worker acts with: this one, or a newer one."""
    state: ReceiptState
    latency_ms: Millis | None = None
    """From the last byte of the request to the worker's word."""
    error: str = ""


class UpdateTimings(Answer):
    """Where the time went."""

    receive_ms: Millis = 0
    verify_ms: Millis = 0
    distribute_ms: Millis = 0
    apply_ms: Millis | None = None
    """From handing over to the last worker's word."""


class ModelUpdate(Answer):
    """One model of an update."""

    digest: str
    etag: str
    bytes: Count
    tensors: Count


class UpdateSummary(Answer):
    """A publish at a glance."""

    update_id: str
    version: Version
    state: UpdateState
    models: tuple[str, ...]
    bytes: Count
    workers: WorkerCounts
    staged_at: Time
    slowest_ms: Millis | None = None
    """From the last byte of the request to the word of the last worker that acknowledged so far."""
    superseded_by: Version | None = None
    error: str = ""


class Update(Answer):
    """A publish, as far as it has come."""

    update_id: str
    model: str
    """The model; with several, the first by name."""
    models: dict[str, ModelUpdate]
    version: Version
    digest: str
    """Of the request's body: `xxh3:` and 32 hex digits."""
    etag: str
    bytes: Count
    tensors: Count
    state: UpdateState
    workers: WorkerCounts
    receipts: tuple[UpdateReceipt, ...]
    """Of the last 20 publishes; of older ones, which have ended, only `workers` is known."""
    superseded_by: Version | None = None
    error: str = ""
    warning: str = ""
    """What did not work though the publish stands."""
    staged_at: Time
    applied_at: Time | None = None
    timings: UpdateTimings
