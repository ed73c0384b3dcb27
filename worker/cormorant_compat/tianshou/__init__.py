"""Tianshou's way of collecting, on this project's engine. A script moves over by changing one import:

    from cormorant_compat.tianshou import Collector            # was: from tianshou.data import Collector

    collector = Collector(policy, envpool.make("CartPole-v1", "gymnasium", num_envs=64), buffer)
    stats = collector.collect(n_step=4096)                      # exactly 4096 frames

Tianshou need not be installed, and is never imported from here: its policies, buffers and vector environments are
known by what they can do. `docs/how-to/migrating-from-tianshou.md` has the table of all arguments.
"""

from cormorant_compat.tianshou.buffers import LatestBatch
from cormorant_compat.tianshou.collector import AsyncCollector, Collector
from cormorant_compat.tianshou.stats import CollectStats, SequenceStats

__all__ = ["AsyncCollector", "CollectStats", "Collector", "LatestBatch", "SequenceStats"]
