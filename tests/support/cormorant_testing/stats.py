"""A fleet's counters as plain data, for what is computed from them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cormorant_worker.collect.timing import BatchTiming
from cormorant_worker.fleet.stats import FleetStats, GroupStats
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker.messages import Sealed


def group_stats(*, spent_s: Mapping[str, float] | None = None, min_version: int = 0) -> GroupStats:
    """One worker ready."""
    return GroupStats(desired=1, alive=1, spent_s=dict(spent_s or {}), versions=Counter([PolicyVersion(min_version)]))


def make_stats(**changed: Any) -> FleetStats:
    """A fleet that has done nothing, but for what is changed."""
    empty = {"frames": 0, "settled_frames": 0, "stepped_frames": 0, "total_frames": None, "version": 0}
    return FleetStats(**(empty | changed))


def sealed(num_frames: int, *, version: int = -1, **told: Any) -> Sealed:
    """A batch without episodes, whose frames have one version."""
    timing = BatchTiming(seconds=0.0, env_step_s=0.0, inference_s=0.0)
    empty = {"number": 0, "timing": timing, "num_rows": 1}
    return Sealed(num_frames=num_frames, min_version=version, max_version=version, **(empty | told))
