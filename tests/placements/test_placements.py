"""Every column of every placement, derived by a plain loop. `cormorant_testing.placements` has the table of cells.

CORMORANT_PLACEMENTS=3 pytest tests/placements            # any three choices meet
CORMORANT_PLACEMENTS=3 pytest tests/placements -k pendulum_b4-ray
CORMORANT_PLACEMENTS=inline-collector-module-normalize-restored pytest tests/placements       # one cell, by its id
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from cormorant_testing.collecting import assert_same
from cormorant_testing.fleets import open_on
from cormorant_testing.placements.cells import Cell, cover
from cormorant_testing.placements.plain_loop import PlainLoop
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.launch import load_job, make_collector
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
    if cell.choices[1].startswith("ray"):
        request.getfixturevalue("ray_cluster")
    loop = PlainLoop(cell)
    play_collector(cell, loop) if "collector" in cell else play_fleet(cell, loop)
    loop.finish()


def play_collector(cell: Cell, loop: PlainLoop) -> None:
    with make_collector(cell.manifest()) as collector:
        saved, expected, mark = b"", None, loop.mark()
        for version in range(1, 6):
            loop.take(batch := collector.collect(num_steps=cell.frames_per_batch))
            if version == 3:
                saved, mark = collector.state(), loop.mark()
            if version == 4:
                expected = batch.clone()
            collector.weights.offer({"policy": loop.publish(version)}, version=version)
        loop.take(collector.collect(num_steps=cell.num_envs + 1))
    if "restored" not in cell:
        return
    with make_collector(cell.manifest()) as collector:
        collector.restore(saved)
        loop.rewind(mark, is_elsewhere=True)
        collector.weights.offer({"policy": loop.publish(3)}, version=3)
        loop.take(batch := collector.collect(num_steps=cell.frames_per_batch))
    if cell.is_saved:
        assert_same([batch], [expected], but=[("collector", "traj_ids")])


def play_fleet(cell: Cell, loop: PlainLoop) -> None:
    engine = "ray" if cell.choices[1].startswith("ray") else "local"
    with LocalFleet(open_on(engine, load_job(cell.manifest()), FleetOptions(workers=cell.workers))) as fleet:
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
