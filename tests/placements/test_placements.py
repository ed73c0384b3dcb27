"""Every column of every placement, derived by a plain loop. `cormorant_testing.placements` has the table of cells.

CORMORANT_PLACEMENTS=3 pytest tests/placements            # any three choices meet
CORMORANT_PLACEMENTS=3 pytest tests/placements -k cheetah_b4-ray
CORMORANT_PLACEMENTS=inline-collector-module-normalize-restored pytest tests/placements       # one cell, by its id
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from cormorant_testing.collecting import assert_same
from cormorant_testing.fleets import open_on
from cormorant_testing.placements import echo_env, echo_torch
from cormorant_testing.placements.cells import CRASHES, SIZES, Cell, cover
from cormorant_testing.placements.echo_env import EchoEnv
from cormorant_testing.placements.echo_jax import EchoFunctions
from cormorant_testing.placements.plain_loop import PlainLoop
from cormorant_testing.placements.witness import build_policy
from cormorant_worker.errors import ManifestError
from cormorant_worker.fleet.options import FleetOptions, RayOptions
from cormorant_worker.launch import load_job, make_collector, open_fleet
from cormorant_worker.local_fleet import LocalFleet

CHOSEN = os.environ.get("CORMORANT_PLACEMENTS", "2")


def params() -> Iterator[Any]:
    if not CHOSEN.isdigit():
        yield pytest.param(Cell.of(CHOSEN), id=CHOSEN)
        return
    fast = cover(1, without=("ray", "ray_served", "jax"))
    for cell in fast:
        yield pytest.param(cell, id=cell.id)
    for cell in cover(int(CHOSEN)):
        if cell not in fast:
            yield pytest.param(cell, id=cell.id, marks=pytest.mark.slow)


@pytest.mark.parametrize("cell", list(params()))
def test_every_column_is_what_a_plain_loop_derives(cell: Cell, request: pytest.FixtureRequest) -> None:
    if cell.refusal:
        with pytest.raises(ManifestError) as refused:
            load_job(cell.manifest())
        assert cell.refusal in str(refused.value)
        return
    if cell.choices[1].startswith("ray"):
        request.getfixturevalue("ray_cluster")
    loop = PlainLoop(cell)
    play_collector(cell, loop) if "collector" in cell else play_fleet(cell, loop)
    loop.finish()


def play_collector(cell: Cell, loop: PlainLoop) -> None:
    with open_collector(cell) as (collector, module):
        if module is not None:
            initial = collector.weights.current()["policy"].items()
            loop.publish(0, {name.removeprefix("witness."): value for name, value in initial})
        saved, expected, mark = b"", None, loop.mark()
        for version in range(1, 6):
            loop.take(batch := collector.collect(num_steps=cell.frames_per_batch))
            if version == 3:
                saved, mark = collector.state(), loop.mark()
            if version == 4:
                expected = batch.clone()
            collector.weights.offer({"policy": loop.publish(version)}, version=version)
        loop.take(collector.collect(num_steps=cell.num_envs + 1))
        if module is not None:  # the learner's module is the one that acted
            witness = getattr(module, "witness", module)
            witness.mean(torch.ones(2, SIZES[cell.world][0])).sum().backward()
            assert all(parameter.grad is not None for parameter in witness.trunk.parameters())
    if "restored" not in cell:
        return
    with open_collector(cell) as (collector, _):
        collector.restore(saved)
        loop.rewind(mark, is_elsewhere=True)
        collector.weights.offer({"policy": loop.publish(3)}, version=3)
        loop.take(batch := collector.collect(num_steps=cell.frames_per_batch))
    if cell.is_saved:
        assert_same([batch], [expected], but=[("collector", "traj_ids")])


@contextmanager
def open_collector(cell: Cell) -> Iterator[tuple[Any, Any]]:
    """A collector, and the learner's module where a script made one."""
    module = None if "script" not in cell else policy_of(cell, is_lazy=True)
    arguments = (cell.manifest(),) if module is None else ()
    with make_collector(*arguments, **({} if module is None else script_of(cell, module))) as collector:
        yield collector, module


def policy_of(cell: Cell, *, is_lazy: bool = False) -> Any:
    return build_policy(*SIZES[cell.world], kind=cell.choices[2], is_discrete=cell.world == "cartpole", is_lazy=is_lazy)


def script_of(cell: Cell, policy: Any) -> dict[str, Any]:
    script = {"policy": policy, "collection": cell.collection()}
    if cell.is_pool:
        env = cell.manifest()["spec"]["env"]
        with pytest.raises(ManifestError, match="num_envs=8 cannot be combined with env"):
            make_collector(env=env, policy=policy, num_envs=8)
        return {"env": env, **script}
    script |= {"num_envs": cell.num_envs, "info": cell.env()["info"]}
    if cell.is_vector:
        kind, _, mode = cell.choices[0].partition("_")
        return {"env": partial((echo_torch if kind == "torch" else echo_env).make_vector, mode=mode), **script}
    if "jax" in cell:
        return {"env": EchoFunctions, **script}
    make = partial(EchoEnv, crashes=CRASHES if "crashes" in cell else 0)
    return {"env": make, "vectorization_mode": cell.choices[0], **script}


def play_fleet(cell: Cell, loop: PlainLoop) -> None:
    with open_placed(cell) as fleet:
        saved, mark, rounds = b"", loop.mark(), 0
        while (batch := fleet.next_batch(timeout=60)) is not None:
            loop.take(batch)
            rounds += 1
            if rounds == 2 and "restored" in cell:
                saved, mark = fleet.state(), loop.mark()
            if rounds == 3 and "restored" in cell:
                fleet.restore(saved)
                loop.rewind(mark, is_elsewhere=False)
            if fleet.version < 8:
                fleet.publish(loop.publish(fleet.version + 1), version=fleet.version + 1)


def open_placed(cell: Cell) -> LocalFleet:
    engine = "ray" if cell.choices[1].startswith("ray") else "local"
    if "script" not in cell:
        return LocalFleet(open_on(engine, load_job(cell.manifest()), FleetOptions(workers=cell.workers)))
    amounts = {"frames_per_batch": cell.frames_per_batch, "total_frames": cell.total_frames, "mode": cell.choices[5]}
    ray = RayOptions(num_cpus=0) if engine == "ray" else None
    return open_fleet(**script_of(cell, policy_of(cell)), **amounts, workers=cell.workers, engine=ray)
