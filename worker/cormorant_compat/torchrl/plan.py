"""The plan of a collector: its environments, policy, settings and seed, and the job that a fleet makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cormorant_compat.torchrl.makers import Maker
from cormorant_compat.torchrl.settings import CollectorSettings, exploration_of, limit
from cormorant_contract.job import CollectorJob
from cormorant_worker.scripted import info_block, script_job

Mode = Literal["sync", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    mode: Mode
    makers: tuple[tuple[Maker, ...], ...]
    """By collector: its environments."""
    policy: Any
    settings: CollectorSettings
    overrides: tuple[Mapping[str, Any], ...] = ()
    """By collector: settings of its own."""
    seed: int = 0
    """Base seed, from which environments and random streams derive theirs, until `set_seed`."""

    @property
    def num_collectors(self) -> int:
        return len(self.makers)

    @property
    def share(self) -> int:
        """Collectors that a batch is of."""
        return self.num_collectors if self.mode == "sync" else 1

    def job(self) -> CollectorJob:
        settings, share = self.settings, self.share
        collection: dict[str, Any] = {
            "mode": self.mode,
            "framesPerBatch": -(-settings.frames_per_batch // share),
            "initRandomFrames": limit(settings.init_random_frames),
            "maxFramesPerTrajectory": limit(settings.max_frames_per_traj),
            "resetAtEachBatch": settings.reset_at_each_iter,
            "seed": self.seed,
        }
        if limit(settings.total_frames):
            collection["totalFrames"] = limit(settings.total_frames)
        if self.mode == "sync":
            # Nothing is stepped between two batches: the next one is collected with what was learned from this one.
            collection["weights"] = {"maxStaleness": 0}
        # Stands for the makers, which travel beside the job.
        gymnasium = {"entrypoint": "script:environment", "vectorization": settings.vectorization}
        return script_job(
            {
                "env": {"gymnasium": gymnasium} | info_block(settings.info),
                "policy": {
                    "random": {},
                    "explorationType": str(exploration_of(settings.exploration_type)),
                    "allowNonfinite": True,  # TorchRL takes any values
                },
                "collection": collection,
                "output": {"queue": {"capacityBatches": 1}},
                "replicas": self.num_collectors,
            }
        )


def next_seed(seed: int, links: int) -> int:
    """The value that TorchRL's `set_seed` returns after `links` environments: 0 gives 795726461, 2841183792,
    2309840538. A script that seeds several things in turn goes on as it did.
    """
    for _ in range(links):
        seed = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % ((1 << 32) - 1)
    return seed


def number_of(worker: str) -> int:
    """A collector's number, from its worker's name."""
    return int(worker.rpartition("-")[2])
