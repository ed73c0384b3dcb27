"""Tianshou's collectors on this engine: `docs/how-to/migrating-from-tianshou.md` has the table of all arguments."""

from cormorant_compat.tianshou import AsyncCollector, Collector, CollectStats, LatestBatch, SequenceStats

__all__ = ["AsyncCollector", "CollectStats", "Collector", "LatestBatch", "SequenceStats"]
