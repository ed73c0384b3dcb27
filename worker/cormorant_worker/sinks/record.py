"""One line of a part's manifest: what is known of a sealed shard. Written by the shard writer, read by everyone."""

import json
from dataclasses import asdict, dataclass, fields

from cormorant_worker.errors import DatasetCorrupt
from cormorant_worker.normalize.moments import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    shard: str
    """File name within the part."""
    frames: int
    first_frame: int
    """Number of the shard's first frame within the part, from 0."""
    last_frame: int
    """Number of its last frame, inclusive."""
    batches: int
    """Record batches, one for each batch that the collector handed over."""
    ends: int
    """Frames that ended a trajectory, terminated or truncated."""
    min_policy_version: int
    max_policy_version: int
    size_bytes: int
    sha256: str
    """Digest of the file, 64 hex digits."""
    schema: str
    """Fingerprint of the schema: `FrameSchema.fingerprint`."""
    sealed_at: str
    """UTC, ISO 8601; for people."""
    statistics: Document | None = None
    """Moments of the shard's frames; None unless the manifest normalises."""

    def to_line(self) -> str:
        """One line of JSON without a newline."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def from_line(cls, line: str, *, where: str) -> "ShardRecord":
        try:
            found = json.loads(line)
            record = cls(**found)
        except (ValueError, TypeError) as error:
            raise DatasetCorrupt(f"{where} is not a manifest line: {error}; restore the file from a copy") from error
        for field in fields(cls):
            if field.name == "statistics":
                continue
            value = getattr(record, field.name)
            if type(value) is not field.type:
                raise DatasetCorrupt(f"{where}: {field.name} is {value!r}; restore the file from a copy")
        return record
