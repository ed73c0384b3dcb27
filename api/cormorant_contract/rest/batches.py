"""`/v1/batches`: the shared-memory variant, for consumers on the head's own machine."""

from cormorant_contract.rest.base import Answer, Count, Millis


class MemoryTensor(Answer):
    """One tensor in a memory."""

    dtype: str
    """The safetensors name, e.g. "F32"."""
    shape: tuple[int, ...]
    offset: Count
    """First byte in the memory; C order from there."""


class MemoryPart(Answer):
    """One worker's share of a batch."""

    path: str
    """What to open and map, read-only."""
    size_bytes: Count
    tensors: dict[str, MemoryTensor]
    """By the names that the safetensors file would have, e.g. `0/observation`."""


class MemoryBatch(Answer):
    """Where a batch lies. Valid until it is acknowledged, released, or its time to acknowledge is over.

    A reader that holds a shared lock (flock) on a part's open file before that time is over may read it for as long as
    it holds the lock: nobody writes there before.
    """

    id: str
    frames: Count
    min_version: int
    max_version: int
    delivery: Count
    ack_within_s: Millis
    lent_at: float | None = None
    """When the time to acknowledge began, by CLOCK_MONOTONIC of the machine. None: an older head does not say."""
    metadata: dict[str, str]
    """The `__metadata__` that the safetensors file would have."""
    parts: tuple[MemoryPart, ...]
