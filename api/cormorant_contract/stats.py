"""Statistics of a fleet: returned by `stats()` of a fleet and of a client."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Snapshot of a fleet."""

    frames: int
    """Frames accepted by the output: what `totalFrames` counts."""
    total_frames: int | None
    """Frames to collect in all; None: no limit."""
    stepped_frames: int
    """Frames stepped so far, including those of unfinished batches. Two readings give a rate."""
    dropped: Mapping[str, int]
    """Frames that were stepped and never delivered, by reason: crash, stale, drop_oldest, drain, restore, seed."""
    episodes: int
    """Episodes that ended so far."""
    mean_return: float | None
    """Mean return of the last 100 episodes; None: none has ended."""
    mean_length: float | None
    metric_means: Mapping[str, float | None]
    """Means of `collection.episodeMetrics` over the same episodes, by name; None: no episode had a number."""
    version: int
    """The newest published policy version."""
    ready_workers: int
    desired_workers: int
    restarts: int
    """Workers that were replaced so far."""
    queued_batches: int
    """Complete batches that no consumer has taken yet."""
    is_paused: bool
