"""The table of placements: one cell is a choice on each axis, and its id names the choices that are not the first.

`cover(2)` gives cells in which any two choices that go together meet somewhere, `cover(3)` any three.
"""

import random
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from manifest_making import collector_job

AXES: dict[str, tuple[str, ...]] = {
    "env": (
        *("inline", "subprocess", "pendulum", "pendulum_b2", "pendulum_b4", "cartpole", "cartpole_b2"),
        *("vector_next", "vector_same", "vector_disabled", "vector_held", "torch_same", "torch_whole", "jax"),
    ),
    "place": ("collector", "local", "local_served", "ray", "ray_served"),
    "policy": ("module", "memory", "tensordict", "recurrent"),
    "workers": ("one", "two"),
    "mode": ("async", "sync"),
    "statistics": ("raw", "normalize"),
    "call": ("eager", "compile"),
    "first": ("acting", "warmup"),
    "limit": ("whole", "cut"),
    "batches": ("go_on", "resets"),
    "lag": ("any_lag", "on_policy"),
    "event": ("steady", "restored", "crashes"),
}
NEVER: dict[tuple[str, str], str] = {
    ("collector", "two"): "a collector stands alone",
    ("collector", "sync"): "a collector stands alone",
    ("collector", "on_policy"): "a collector acts with the newest weights that it was offered",
    **{(env, "crashes"): "EnvPool's environments do not raise" for env in AXES["env"][2:7]},
    **{(env, "crashes"): "one that raises ends a vector environment" for env in AXES["env"][7:13]},
    ("jax", "crashes"): "compiled functions do not raise",
    **{
        (env, choice): "its rows cannot be reset alone"
        for env in ("vector_held", "torch_whole")
        for choice in ("cut", "resets")
    },
    **{(env, "resets"): "environments with steps in flight cannot be reset" for env in AXES["env"] if "_b" in env},
}
"""Choices that do not exist together."""
TASKS = {"pendulum": "Pendulum-v1", "cartpole": "CartPole-v1"}
SIZES = {"echo": (5, 2), "pendulum": (3, 1), "cartpole": (4, 1)}
"""Values of an observation and of an action."""
CUT, LONGEST, CRASHES, WARMUP = 5, 12, 17, 13
NAMESPACE = "cormorant_testing.placements"


@dataclass(frozen=True, slots=True)
class Cell:
    choices: tuple[str, ...]

    def __contains__(self, choice: str) -> bool:
        return choice in self.choices

    @classmethod
    def of(cls, cell_id: str) -> "Cell":
        named = cell_id.split("-")
        return cls(tuple(next((c for c in choices if c in named), choices[0]) for choices in AXES.values()))

    @property
    def id(self) -> str:
        firsts = [choices[0] for choices in AXES.values()]
        named = [c for i, (c, first) in enumerate(zip(self.choices, firsts, strict=True)) if c != first or i < 3]
        return "-".join(named)

    @property
    def world(self) -> str:
        name = self.choices[0].partition("_")[0]
        return name if name in TASKS else "echo"

    @property
    def is_pool(self) -> bool:
        return self.world in TASKS

    @property
    def is_vector(self) -> bool:
        return self.choices[0].startswith(("vector", "torch"))

    @property
    def is_saved(self) -> bool:
        """Environments with states."""
        return not self.is_pool and not self.is_vector

    @property
    def num_envs(self) -> int:
        return 8 if self.is_pool else 3

    @property
    def workers(self) -> int:
        return 2 if "two" in self else 1

    @property
    def frames_per_batch(self) -> int:
        return self.num_envs * 8

    @property
    def total_frames(self) -> int:
        """The last round is a short one. Fleets collect some ahead of a restore."""
        return self.workers * self.frames_per_batch * (5 if "collector" in self else 9) + self.num_envs + 1

    def env(self) -> dict[str, Any]:
        """`spec.env`, without the number of environments."""
        if self.is_pool:
            batch = int(self.choices[0].partition("_b")[2] or 0)
            pool = {"taskId": TASKS[self.world], "batchSize": batch, "numThreads": 2}
            return {"envpool": pool, "maxEpisodeSteps": LONGEST, "info": [{"key": "elapsed_step"}]}
        info = [{"key": "echo", "dtype": "float32"}, {"key": "won", "dtype": "bool", "fill": 0}]
        if self.is_vector:
            kind, _, mode = self.choices[0].partition("_")
            module = "echo_torch" if kind == "torch" else "echo_env"
            made: dict[str, Any] = {"entrypoint": f"{NAMESPACE}.{module}:make_vector", "kwargs": {"mode": mode}}
            return {"vector": made, "info": info}
        if "jax" in self:
            return {"jax": {"entrypoint": f"{NAMESPACE}.echo_jax:EchoFunctions"}, "info": info}
        made = {"entrypoint": f"{NAMESPACE}.echo_env:EchoEnv", "vectorization": self.choices[0]}
        made |= {"kwargs": {"crashes": CRASHES if "crashes" in self else 0}}
        return {"gymnasium": made, "info": info}

    def collection(self) -> dict[str, Any]:
        found: dict[str, Any] = {"resetAtEachBatch": "resets" in self, "seed": 7}
        found["maxFramesPerTrajectory"] = CUT if "cut" in self else 0
        found["initRandomFrames"] = WARMUP if "warmup" in self else 0
        if "normalize" in self:
            found["normalize"] = {"observation": {"clip": 3}}
        if "on_policy" in self:
            found["weights"] = {"maxStaleness": 0}
        return found

    def manifest(self) -> dict[str, Any]:
        env = self.env()
        env[next(kind for kind in ("envpool", "gymnasium", "vector", "jax") if kind in env)]["numEnvs"] = self.num_envs
        amounts = {"framesPerBatch": self.frames_per_batch, "totalFrames": self.total_frames}
        spec: dict[str, Any] = {
            "env": env,
            "policy": {
                "entrypoint": f"{NAMESPACE}.witness:make_policy",
                "kwargs": {"kind": self.choices[2]},
                "compile": "auto" if "compile" in self else "off",
            },
            "collection": {**self.collection(), **amounts, "mode": "sync" if "sync" in self else "async"},
            "output": {"queue": {"capacityBatches": 2}},
            "replicas": self.workers,
        }
        if self.choices[1].endswith("served"):
            spec["workerGroups"] = [{"name": "cpu"}, {"name": "act", "role": "inference", "replicas": 1}]
        return collector_job("placement", spec)


def cover(strength: int, *, without: tuple[str, ...] = ()) -> list[Cell]:
    """Cells in which any `strength` choices of different axes that exist together meet in one cell at least."""
    axes = [tuple(choice for choice in choices if choice not in without) for choices in AXES.values()]
    left = {part for some in combinations(axes, strength) for part in product(*some) if _is_real(part)}
    chance, found = random.Random(94 + strength), []  # the few cells of strength 1 show much
    for part in sorted(left):
        if part in left:
            tried = {_complete(part, axes, chance): None for _ in range(20)}
            best = max(tried, key=lambda cell: len(left.intersection(combinations(cell.choices, strength))))
            left.difference_update(combinations(best.choices, strength))
            found.append(best)
    return found


def _is_real(part: tuple[str, ...]) -> bool:
    return not any(pair in NEVER for pair in combinations(part, 2))


def _complete(part: tuple[str, ...], axes: list[tuple[str, ...]], chance: random.Random) -> Cell:
    while True:
        cell = Cell(tuple(next((c for c in part if c in choices), chance.choice(choices)) for choices in axes))
        if _is_real(cell.choices):
            return cell
