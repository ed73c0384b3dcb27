"""Random jobs with a policy for each group of agents, and what happens to them, each from one number, beside a plain
loop. `cormorant_testing.placements.parties` has the jobs and the loop.

CORMORANT_PARTIES=2000 pytest tests/integration/worker/test_parties.py -k collector       # as many jobs
CORMORANT_PARTIES=100 pytest tests/integration/worker/test_parties.py -k local
"""

import os
import random
import re
import signal
from collections.abc import Callable

import pytest

from cormorant_testing.fleets import on_both_engines_slowly, open_on
from cormorant_testing.placements.parties import ENVS, PartyJob, PartyLoop
from cormorant_worker.errors import StateError
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.launch import load_job, make_collector
from cormorant_worker.local_fleet import LocalFleet

PARTIES = int(os.environ.get("CORMORANT_PARTIES", "0"))
SEEDS = range(PARTIES) if PARTIES else [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 16))]


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, PARTIES or 50, 50)], ids=str)
def test_collector(seeds: range) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        job = PartyJob.of(chance, is_fleet=False)
        try:
            play_collector(job, chance)
        except Exception as error:
            error.add_note(f"seed {seed}: {job}")
            raise


def play_collector(job: PartyJob, chance: random.Random) -> None:
    loop, saved = PartyLoop(job), b""
    with make_collector(job.manifest()) as collector:
        for _ in range(14):
            match chance.choice([*["collect"] * 3, *["publish"] * 4, "save", "restore"]):
                case "collect":
                    frames = chance.choice([1, 2, ENVS, ENVS * 4, ENVS * 8, ENVS * 8 + 2])
                    loop.take(collector.collect(num_steps=frames))
                case "publish" if job.models:
                    version, weights = publish(loop, chance)
                    collector.weights.offer(weights, version=version)
                case "save":
                    saved = collector.state()
                case "restore" if saved:
                    collector.restore(saved)
                    loop.restored()


def publish(loop: PartyLoop, chance: random.Random) -> tuple[int, dict[str, dict[str, object]]]:
    models = chance.sample([*loop.job.models], chance.randint(1, len(loop.job.models)))
    version = loop.version + chance.choice([1, 1, 3])
    return version, loop.publish(models, version)


@on_both_engines_slowly
@pytest.mark.parametrize("seed", SEEDS)
def test_fleet(engine: str, seed: int) -> None:
    chance = random.Random(seed)
    job = PartyJob.of(chance, is_fleet=True)
    loop, saved = PartyLoop(job), b""
    loop.is_exact = False
    for is_last in chance.choice([(True,), (False, True)]):
        with LocalFleet(open_on(engine, load_job(job.manifest()), FleetOptions(workers=job.workers))) as fleet:
            try:
                if saved:
                    fleet.restore(saved)
                    loop.restored()
                play_fleet(fleet, loop, chance, is_whole=is_last and not saved)
                if not is_last and not (saved := unless_gone(fleet.state) or b""):
                    return
            except Exception as error:
                error.add_note(str(job))
                raise


def play_fleet(fleet: LocalFleet, loop: PartyLoop, chance: random.Random, *, is_whole: bool) -> None:
    job, saved, total = loop.job, b"", loop.job.total * is_whole
    for _ in range(14):
        match chance.choice([*["take"] * 4, *["publish"] * 4, "burst", "save", "restore", "kill", "pause"]):
            case "take":
                if (batch := fleet.next_batch(timeout=60)) is None:
                    break
                loop.take(batch)
            case "publish" | "burst" as what if job.models:
                for _ in range(1 if what == "publish" else chance.randint(2, 6)):
                    version, weights = publish(loop, chance)
                    fleet.publish(weights, version=version)
            case "save":
                saved = unless_gone(fleet.state) or saved
            case "restore" if saved:
                total = 0
                unless_gone(lambda: fleet.restore(saved))  # noqa: B023  # called at once
                loop.restored()
            case "kill" if alive := [worker.pid for worker in fleet.workers() if worker.pid]:
                loop.gaps = True
                os.kill(chance.choice(alive), signal.SIGKILL)
            case "pause":
                with fleet.pause():
                    pass
    while total and (batch := fleet.next_batch(timeout=60)) is not None:
        loop.take(batch)
    if total:
        assert loop.frames == total
        assert loop.gaps or job.crashes or not job.models or loop.random_frames == job.warmup


def unless_gone(call: Callable[[], bytes | None]) -> bytes | None:
    """What a call returns; None: a worker was killed meanwhile, or everything is collected."""
    try:
        return call()
    except StateError as error:
        if not re.search("call again|ended and could not|all its frames", str(error)):
            raise
        return None
