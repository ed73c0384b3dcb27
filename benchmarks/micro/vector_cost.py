"""A vector environment collected into batches against a bare loop over the same one that keeps nothing, in turn."""

from typing import Any

import gymnasium
import numpy as np

from benchmarks.micro import rows
from cormorant_worker.collect.block import Block
from cormorant_worker.launch import make_collector

ALE = {"id": "ale_py:ALE/Pong-v5", "numEnvs": 64}
CARTPOLE = {"id": "CartPole-v1", "numEnvs": 1024, "kwargs": {"vectorization_mode": "vector_entry_point"}}
CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("ALE Pong, NEXT_STEP", ALE, "> 0.9"),
    ("ALE Pong, SAME_STEP", ALE | {"kwargs": {"autoreset_mode": "SameStep"}}, "> 0.9"),
    ("CartPole written in numpy, no reset_mask", CARTPOLE, ""),
)
STEPS = 16


def measure(*, quick: bool) -> list[dict]:
    """Rows of the report."""
    return [_compare(name, block, bar, rounds=5 if quick else 15) for name, block, bar in CASES]


def _compare(name: str, block: dict[str, Any], bar: str, *, rounds: int) -> dict:
    num_envs = block["numEnvs"]
    bare = gymnasium.make_vec(block["id"], num_envs=num_envs, **block.get("kwargs", {}))
    draw = np.random.default_rng(0)
    actions = [draw.integers(0, bare.single_action_space.n, num_envs) for _ in range(STEPS)]
    bare.reset(seed=1)

    def loop() -> None:
        for action in actions:
            bare.step(action)

    with make_collector(env={"vector": block}, seed=1) as collector:
        kept = Block(collector.layout(STEPS))
        without, with_it = rows.interleaved(loop, lambda: collector.fill(kept, num_envs * STEPS), rounds=rounds)
    bare.close()
    note = f"{num_envs} environments, random actions"
    return rows.row(f"vector environment: {name}", rows.median_ratio(without, with_it), "x", bar=bar, note=note)


if __name__ == "__main__":
    rows.main(measure)
