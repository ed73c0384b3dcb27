"""A fleet's counters as plain data, for what is computed from them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cormorant_worker.fleet.stats import FleetStats, GroupStats
from cormorant_worker.weights.staged import PolicyVersion


def group_stats(*, spent_s: Mapping[str, float] | None = None, min_version: int = 0) -> GroupStats:
    """One worker ready."""
    return GroupStats(desired=1, alive=1, spent_s=dict(spent_s or {}), versions=Counter([PolicyVersion(min_version)]))


def make_stats(**changed: Any) -> FleetStats:
    """A fleet that has done nothing, but for what is changed."""
    empty = {"frames": 0, "settled_frames": 0, "stepped_frames": 0, "total_frames": None, "version": 0}
    return FleetStats(**(empty | changed))
