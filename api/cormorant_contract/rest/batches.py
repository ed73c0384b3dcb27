"""`/v1/batches`: the shared-memory variant, for consumers on the head's own machine."""

from cormorant_contract.rest.base import Answer, Count, Millis


class MemoryTensor(Answer):
    """Location of one tensor in a shared-memory file."""

    dtype: str
    """The safetensors name, e.g. "F32"."""
    shape: tuple[int, ...]
    offset: Count
    """First byte in the file; the tensor follows in C order."""


class MemoryPart(Answer):
    """One worker's share of a batch."""

    path: str
    """File to open and map read-only."""
    size_bytes: Count
    tensors: dict[str, MemoryTensor]
    """Keyed by the tensor's name in the safetensors file, e.g. `0/observation`."""


class MemoryBatch(Answer):
    """Location of a batch in shared memory. Valid until it is acknowledged or released, or `ack_within_s` has passed.

    A reader that takes a shared lock (flock) on a part's open file within that time may read the part for as long as
    it holds the lock: no worker writes there meanwhile.
    """

    id: str
    frames: Count
    min_version: int
    max_version: int
    delivery: Count
    ack_within_s: Millis
    lent_at: float
    """When `ack_within_s` began, on the machine's CLOCK_MONOTONIC."""
    metadata: dict[str, str]
    """The `__metadata__` that the safetensors file would have."""
    parts: tuple[MemoryPart, ...]
