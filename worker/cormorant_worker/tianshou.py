"""The public name of the Tianshou compatibility layer; the code is in `compat/tianshou/`."""

from cormorant_worker.compat.tianshou import AsyncCollector, Collector, CollectStats, LatestBatch, SequenceStats

__all__ = ["AsyncCollector", "CollectStats", "Collector", "LatestBatch", "SequenceStats"]
