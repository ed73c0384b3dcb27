"""A schedule of chaos, from one number: what kind of job, on which engine, and what happens to it when.

plan_of(17) == plan_of(17), for ever within one revision of this file
"""

import random
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cormorant_testing.chaos.witness import ENTRYPOINT
from cormorant_testing.collecting import make_job

Door = Literal["fleet", "head"]
Engine = Literal["local", "ray"]

_FLEET_THEMES: dict[str, dict[str, int]] = {
    "mixed": {"publish": 4, "burst": 1, "pause": 2, "resize": 2, "kill": 2, "freeze": 1, "thaw": 1, "save": 1,
              "restore": 1, "seed": 1, "slow": 1},
    "frozen": {"freeze": 3, "burst": 3, "publish": 2, "pause": 2, "thaw": 2, "kill": 1, "resize": 1},
    "states": {"save": 3, "restore": 3, "publish": 2, "kill": 2, "seed": 1, "slow": 1, "pause": 1},
    "moves": {"move": 2, "save": 1, "restore": 1, "kill": 2, "publish": 2, "resize": 1},
    "sizes": {"resize": 5, "kill": 2, "publish": 2, "pause": 2, "slow": 1, "seed": 1},
    "disk": {"fill disk": 2, "kill": 2, "publish": 2, "resize": 1, "pause": 1, "freeze": 1},
}  # fmt: skip
_HEAD_THEMES: dict[str, dict[str, int]] = {
    "mixed": {"publish": 4, "burst": 1, "lease": 2, "resize": 2, "kill": 2, "freeze": 1, "thaw": 1, "save": 1,
              "restore": 1, "seed": 1, "hold": 1, "eater": 1, "kill head": 1, "freeze head": 1, "fill disk": 1},
    "frozen": {"freeze": 3, "freeze head": 2, "burst": 3, "lease": 3, "thaw": 2, "publish": 1},
    "leases": {"freeze": 2, "lease": 5, "thaw": 1, "publish": 2, "kill": 1, "resize": 1},
    "consumers": {"hold": 4, "eater": 2, "publish": 2, "kill": 1, "resize": 1,
                  "lease": 1},
    "heads": {"kill head": 2, "cycle": 4, "publish": 2, "save": 1},
    "states": {"save": 3, "restore": 3, "kill": 1, "publish": 2, "seed": 1, "hold": 1},
    "disk": {"fill disk": 3, "publish": 3, "kill": 1, "lease": 1, "resize": 1, "kill head": 1},
}  # fmt: skip


class Step(NamedTuple):
    after_s: float
    """Seconds since the last one."""
    what: str
    amount: float
    """Between 0 and 1: how much or which, as the thing sees fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    door: Door
    engine: Engine
    theme: str
    workers: int
    mode: Literal["sync", "async"]
    staleness: int | None
    drops: bool
    resets: bool
    saveable: bool
    has_dataset: bool
    capacity: int
    max_restarts: int
    thaws: bool
    """Frozen workers are woken before calm is asked for; else the fleet must find them out."""
    maps: bool
    """Consumers of a head map its memory."""
    servers: int
    """Inference servers that act for the workers; 0: each worker acts for itself."""
    normalizes: bool
    """With running statistics, which must hold every frame once."""
    steps: tuple[Step, ...]

    @property
    def may_miss(self) -> bool:
        """Frames within a trajectory may be missing from the start on."""
        return self.drops or self.staleness is not None

    def job(self, dataset: str = "") -> Any:
        collection: dict[str, Any] = {"mode": self.mode, "framesPerBatch": 20, "seed": self.seed % 1000}
        if self.resets:
            collection["resetAtEachBatch"] = True
        if self.staleness is not None:
            collection["weights"] = {"maxStaleness": self.staleness}
        if self.normalizes:
            collection["normalize"] = {"observation": {}, "reward": {}}
        kwargs = {"step_s": 0.004, "saveable": self.saveable}
        return make_job(
            env={"gymnasium": {"entrypoint": ENTRYPOINT, "vectorization": "inline", "numEnvs": 2, "kwargs": kwargs}},
            policy="versioned",
            collection=collection,
            queue={"capacityBatches": self.capacity, "onFull": "drop_oldest" if self.drops else "wait"},
            dataset=dataset,
            run_policy={"maxRestartsPerSlot": self.max_restarts},
            worker_groups=[{"name": "cpu"}, {"name": "act", "role": "inference", "replicas": self.servers}]
            if self.servers
            else [],
        )


def plan_of(seed: int) -> Plan:
    """The schedule of a number. Every fourth is on Ray, every second has a head."""
    chance = random.Random(seed)
    engine: Engine = "ray" if seed % 4 == 3 else "local"
    door: Door = ("fleet", "head")[seed % 2] if engine == "local" else ("fleet", "head")[seed // 4 % 2]
    themes = _FLEET_THEMES if door == "fleet" else _HEAD_THEMES
    theme = chance.choice(list(themes))
    weights = themes[theme]
    # Seeds and ids of heads must differ though every attempt of a place is allowed for.
    max_restarts = chance.randint(0, 2) if theme == "heads" else 60
    length = chance.randint(6, 14)
    steps = tuple(
        Step(after_s=chance.uniform(0.05, 0.6), what=what, amount=chance.random())
        for what in chance.choices(list(weights), list(weights.values()), k=length)
    )
    has_states = any(step.what in ("restore", "move") for step in steps)
    return Plan(
        seed=seed,
        door=door,
        engine=engine,
        theme=theme,
        workers=chance.randint(1, 3),
        mode=chance.choice(["sync", "async"]),
        staleness=chance.choice([None, None, None, 0, 2]),
        drops=chance.random() < 0.2,
        resets=chance.random() < 0.2,
        saveable=chance.random() < 0.7,
        has_dataset=door == "fleet" and not has_states and (chance.random() < 0.25 or theme == "disk"),
        capacity=chance.randint(2, 6),
        max_restarts=max_restarts,
        thaws=chance.random() < 0.5,
        maps=chance.random() < 0.7,
        servers=chance.choice([0, 0, 1, 2]) if engine == "local" else 0,
        normalizes=chance.random() < 0.4,
        steps=steps,
    )
