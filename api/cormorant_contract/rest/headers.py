"""Names of headers and media types that both sides use."""

SAFETENSORS = "application/vnd.safetensors"
PROBLEM_JSON = "application/problem+json"
MEMORY_JSON = "application/vnd.cormorant.memory+json"
"""Asked for by a consumer on the head's own machine: where the batch lies in shared memory, instead of its bytes."""
BATCH_STREAM = "application/vnd.cormorant.batches"
"""`GET /v1/batches`: 8 bytes (little-endian length of what follows), one safetensors file; repeated."""

BATCH_ID = "Cormorant-Batch-Id"
FRAMES = "Cormorant-Frames"
MIN_VERSION = "Cormorant-Min-Version"
MAX_VERSION = "Cormorant-Max-Version"
DELIVERY = "Cormorant-Delivery"
"""1 for the first time that a batch is handed out."""
ACK_WITHIN = "Cormorant-Ack-Within"
"""Seconds after which a batch that was not acknowledged goes to the next consumer."""
POLICY_VERSION = "Cormorant-Policy-Version"
"""On weights: the version of the bytes."""

DIGEST_PREFIX = "xxh3:"


def make_etag(version: int, digest: str) -> str:
    """The strong ETag of a version of weights: `"7:xxh3:..."`, quotes included."""
    return f'"{version}:{digest}"'
