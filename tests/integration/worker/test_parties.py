"""Policies of groups of agents: which version acted, told by the environment and not by the batch. First random jobs
and what happens to them, each from one number, beside a plain loop: `cormorant_testing.placements.parties` has both.

CORMORANT_PARTIES=2000 pytest tests/integration/worker/test_parties.py -k test_collector       # as many jobs
CORMORANT_PARTIES=100 pytest tests/integration/worker/test_parties.py -k "test_fleet and local"
"""

import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cormorant_client import connect
from cormorant_testing.agents import Party
from cormorant_testing.fleets import on_both_engines_slowly, open_on
from cormorant_testing.placements.parties import DRAWN, ENVS, OWN, PartyJob, PartyLoop
from cormorant_testing.serving import serve
from cormorant_worker.errors import ManifestError, PolicyMismatch, StateError
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.launch import load_job, make_collector, open_fleet
from cormorant_worker.local_fleet import LocalFleet
from manifest_making import Document, manifest

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


# -- one promise each ------------------------------------------------------------------------------------------


def sampling(window: int, latest_ratio: float, *, pinned: int | None = None, **job: Any) -> tuple[PartyLoop, Document]:
    """Blue draws from versions of red, which plays one of them if it is pinned."""
    red = OWN if pinned is None else {**OWN, "version": pinned}
    policies = DRAWN | {"red": red, "blue": {"model": "red", "sample": {"window": window, "latestRatio": latest_ratio}}}
    made = PartyJob(policies=policies, **job)
    return PartyLoop(made), made.manifest()


@pytest.mark.parametrize(("window", "ratio"), [(1, 0.0), (4, 0.5), (64, 1.0)])
def test_draws_have_the_shares_of_the_manifest(window: int, ratio: float) -> None:
    loop, document = sampling(window, ratio, num_envs=16)
    with make_collector(document) as collector:
        for version in range(1, 9):
            collector.weights.offer(loop.publish(["red"], version), version=version)
            collector.weights.apply()
        for _ in range(7):
            loop.take(collector.collect(num_steps=16 * 40))
    drawn = Counter(loop.played.values())
    past = min(window, 9)
    shares = {9 - past + i: (1 - ratio) / past for i in range(past)}
    shares[8] += ratio
    total = sum(drawn.values())
    assert total > 700
    assert set(drawn) == {version for version, share in shares.items() if share}
    # Five standard deviations.
    assert all(abs(drawn[v] / total - p) <= 5 * (p * (1 - p) / total) ** 0.5 for v, p in shares.items())


def test_no_version_is_kept_that_nobody_plays() -> None:
    loop, document = sampling(1, 0.0)
    with make_collector(document) as collector:
        for version in range(1, 13):
            loop.take(collector.collect(num_steps=5))  # not every environment acts in every batch alike
            collector.weights.offer(loop.publish(["red"], version), version=version)
        loop.take(collector.collect(num_steps=60))
        collector.weights.offer(loop.publish(["red"], 13), version=13)
        loop.take(collector.collect(num_steps=4))
        assert set(collector.actor._history["red"]) == {12, 13}


def test_a_paused_worker_keeps_what_it_may_still_play() -> None:
    loop, document = sampling(4, 0.5, pinned=3)
    with make_collector(document) as collector:
        for version in range(1, 40):
            collector.weights.offer(loop.publish(["red"], version), version=version)
            if version == 20:
                collector.weights.apply()
        assert set(collector.actor._offered["red"]) == {3, *range(17, 21), *range(36, 40)}
        loop.take(collector.collect(num_steps=200))


def test_a_restored_collector_draws_the_same() -> None:
    loop, document = sampling(8, 0.2)
    played = []
    with make_collector(document) as collector:
        for version in range(1, 9):
            loop.take(collector.collect(num_steps=60))
            collector.weights.offer(loop.publish(["red"], version), version=version)
        saved = collector.state()
        for _ in range(2):
            collector.collect(num_steps=120)
            collector.restore(saved)
            loop.restored()
            batch = collector.collect(num_steps=120)
            loop.take(batch)
            played.append(batch["collector", "blue", "policy_version"])
    assert torch.equal(*played)


def take_late(batches: Iterator[Any], loop: PartyLoop, *, pinned: int) -> set[int]:
    """The versions that are drawn while red plays this one."""
    before = set(loop.played)
    while len(loop.played) < len(before) + 100:
        loop.take(batch := next(batches))
        if not (batch["collector", "red", "policy_version"] == pinned).all():
            before = set(loop.played)
    return {version for key, version in loop.played.items() if key not in before}


@on_both_engines_slowly
def test_a_worker_that_comes_later_draws_from_the_window(engine: str) -> None:
    loop, document = sampling(3, 0.0, num_envs=12)
    loop.gaps, loop.is_exact = True, False
    with LocalFleet(open_on(engine, load_job(document), FleetOptions(workers=1))) as fleet:
        for version in range(1, 7):
            loop.take(fleet.next_batch(timeout=60))
            fleet.publish(loop.publish(["red"], version), wait=60)
        os.kill(fleet._fleet.stats().workers[0].pid, signal.SIGKILL)
        while not fleet._fleet.stats().workers or not fleet._fleet.stats().workers[0].attempt:
            loop.take(fleet.next_batch(timeout=60))
        assert take_late(fleet.batches(), loop, pinned=6) == {4, 5, 6}


def test_a_new_head_has_the_window_and_what_is_pinned(tmp_path: Path) -> None:
    loop, document = sampling(3, 0.0, pinned=2, num_envs=12)
    loop.is_exact = False
    for start in (0, 6):
        with (
            serve(load_job(document), directory=tmp_path, keep_versions=1) as served,
            connect(served.server.url, token=served.writer.token) as client,
        ):
            batches = (delivery.tensordict() for delivery in client.deliveries(prefetch=0))
            for version in range(start + 1, 7):
                loop.take(next(batches))
                client.publish(loop.publish(["red"], version), wait=60)
            if start:
                assert take_late(batches, loop, pinned=2) == {4, 5, 6}


def test_a_restored_fleet_has_the_window_and_what_is_pinned(tmp_path: Path) -> None:
    loop, document = sampling(2, 0.0, pinned=2, num_envs=12)
    with open_fleet(document, workers=1) as fleet:
        for version in (1, 3, 4):
            fleet.publish(loop.publish(["red"], version), version=version, wait=60)
        saved = fleet.state()
    loop.restored()
    with open_fleet(document, workers=1) as fleet:
        fleet.restore(saved)
        assert take_late(fleet.batches(), loop, pinned=1) == {3, 4}
    with serve(load_job(document), directory=tmp_path) as served:
        assert served.writer.post("/v1/pauses", {"owner": "tests", "wait_seconds": 60}).json["state"] == "paused"
        assert served.writer.put("/v1/state", saved).status == 200
        kept = served.reader.get("/v1/models/red/versions").json["versions"]
        assert [one["version"] for one in kept] == [4, 3, 1]


def test_policies_and_random_actions_heed_masks() -> None:
    drawn: Document = {f"player_{number}": {"random": {}} for number in range(4)}
    # It refuses other actions.
    rounds = {"pettingzoo": {"entrypoint": "cormorant_testing.agents:Rounds", "groups": "perAgent", "numEnvs": 4}}
    players = drawn | {"player_0": {"entrypoint": "cormorant_testing.agents:legal"}}
    with make_collector(manifest(env=rounds, policy={"agents": players})) as collector:
        batch = collector.collect(num_steps=400)
    first = batch["player_0"]
    assert torch.equal(first["action"], first["action_mask"].long().argmax(-1))
    assert not batch["collector", "policy_version"].any()
    warmed = manifest(env=rounds, policy={"agents": drawn}, collection={"framesPerBatch": 8, "initRandomFrames": 6})
    with make_collector(warmed) as collector:
        assert (collector.collect(num_steps=8)["collector", "policy_version"] == -1).all()
        assert collector.first_frames.left == 0


@pytest.mark.parametrize(
    ("agents", "sentence"),
    [
        ({"red": OWN}, "policy.agents has red, but the environment's groups are blue, green, red"),
        (DRAWN | {"blue": {"model": "red"}}, "the group blue has the spaces .* entrypoint of its own"),
        (
            DRAWN | {"blue": {"entrypoint": "cormorant_testing.placements.parties:scripted", "version": 0}},
            "policy.agents.blue has version or sample, but its policy has no weights",
        ),
        (
            {**DRAWN, "blue": {"random": {}}, "red": {"entrypoint": "cormorant_testing.placements.parties:masking"}},
            "the policy writes red.mask, which is another key of batches",
        ),
    ],
)
def test_what_does_not_fit_is_refused(agents: Document, sentence: str) -> None:
    unequal = {"entrypoint": "cormorant_testing.agents:Unequal", "vectorization": "inline"}
    with pytest.raises((ManifestError, PolicyMismatch), match=sentence):
        make_collector(manifest(env={"pettingzoo": unequal}, policy={"agents": agents}))


def test_a_script_says_the_policies_as_a_manifest_does() -> None:
    loop = PartyLoop(PartyJob(policies=DRAWN, absences="deaths"))
    with make_collector(env=Party, policy={"agents": DRAWN}, num_envs=3, seed=3) as collector:
        loop.take(collector.collect(num_steps=60))
    assert set(loop.played.values()) == {0}
