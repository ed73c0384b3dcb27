"""Header names and media types that head and clients share."""

SAFETENSORS = "application/vnd.safetensors"
PROBLEM_JSON = "application/problem+json"
MEMORY_JSON = "application/vnd.cormorant.memory+json"
"""For consumers on the head's machine: the location of the batch in shared memory instead of its bytes."""

BATCH_ID = "Cormorant-Batch-Id"
FRAMES = "Cormorant-Frames"
MIN_VERSION = "Cormorant-Min-Version"
MAX_VERSION = "Cormorant-Max-Version"
DELIVERY = "Cormorant-Delivery"
"""How often the batch has been delivered, from 1."""
ACK_WITHIN = "Cormorant-Ack-Within"
"""Seconds after which an unacknowledged batch goes to the next consumer."""
SETTLED = "Cormorant-Settled"
"""A head's signed count of settled frames, which a consumer sends back with its next request for a batch."""
POLICY_VERSION = "Cormorant-Policy-Version"
"""Version of the weights in the body."""

DIGEST_PREFIX = "xxh3:"


def make_etag(version: int, digest: str) -> str:
    """The strong ETag of a version of weights: `"7:xxh3:..."`, quotes included."""
    return f'"{version}:{digest}"'
