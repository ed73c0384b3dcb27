"""A collector's state as bytes: saved at a batch boundary, restored by an equal collector.

Format: safetensors, arrays by name, JSON in its metadata. Holds the generators, the environments where they can be
saved, first observations, recurrent states, open trajectories, the count of frames, the policy version, and the
normalization statistics of a collector without a fleet. The weights are not in it: they are published again by version.
"""

import json
from typing import Any

from cormorant_contract.tensor_file import parse_header
from cormorant_worker.errors import StateError
from cormorant_worker.spaces import Array

FORMAT = 1


def read_metadata(data: bytes | memoryview) -> dict[str, Any]:
    """Metadata of a state: `envs_saved`, `why_not`, `warmup_left`, ..."""
    try:
        metadata: dict[str, Any] = json.loads(parse_header(data).metadata["cormorant"])
        found, kinds = metadata["format"], [type(metadata.get(name)) for name in ("envs_saved", "warmup_left")]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"this is not a collector's state: {error!r}") from error
    if found != FORMAT:
        raise StateError(f"the state has format {found}, this version reads {FORMAT}")
    if kinds != [bool, int]:
        raise StateError(
            "this is not a collector's state: envs_saved is not true or false, or warmup_left is not a count"
        )
    return metadata


def under(arrays: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
