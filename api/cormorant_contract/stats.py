"""How a fleet is doing, in the same words wherever it runs: what `stats()` of a fleet and of a client returns."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A fleet at one moment."""

    frames: int
    """Frames accepted by the output: what `totalFrames` counts."""
    total_frames: int | None
    """As many as are wanted; None: without end."""
    stepped_frames: int
    """Frames stepped so far, those of unfinished batches among them: two readings give a rate."""
    dropped: Mapping[str, int]
    """Frames that were stepped and never delivered, by reason: crash, stale, drop_oldest, drain, restore, seed."""
    episodes: int
    """Episodes that ended so far."""
    mean_return: float | None
    """Over the last 100 of them; None: none has ended."""
    mean_length: float | None
    metric_means: Mapping[str, float | None]
    """What the manifest reports of the same episodes, by name; None: none of them had a number."""
    version: int
    """The newest published policy version."""
    ready_workers: int
    desired_workers: int
    restarts: int
    """Workers that were replaced so far."""
    queued_batches: int
    """Complete, and not with a consumer."""
    is_paused: bool
