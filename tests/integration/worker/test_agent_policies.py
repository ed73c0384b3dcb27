"""Policies of groups of agents: which version acted, told by the environment and not by the batch."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from cormorant_client import connect
from cormorant_testing.fleets import on_both_engines_slowly, open_on
from cormorant_testing.serving import serve
from cormorant_testing.versions import MIRROR, POLICIES, Check, Mirror, weights
from cormorant_worker.errors import ManifestError
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.launch import load_job, make_collector, open_fleet
from cormorant_worker.local_fleet import LocalFleet
from cormorant_worker.sinks.reader import read_dataset
from manifest_making import Document, manifest

NUMBERED = POLICIES["red"]


def job(*, agents: Document | None = None, env: Document | None = None, **collection: Any) -> Document:
    document = manifest("mirror", env={"pettingzoo": MIRROR | (env or {})}, policy={"agents": agents or POLICIES})
    document["spec"]["collection"] = {"framesPerBatch": 60, "seed": 3, **collection}
    return document


def sampling(window: int, latest_ratio: float) -> Document:
    return {**POLICIES, "blue": {"model": "red", "sample": {"window": window, "latestRatio": latest_ratio}}}


@pytest.mark.parametrize(("window", "ratio"), [(1, 0.0), (4, 0.5), (64, 1.0)])
def test_draws_have_the_shares_of_the_manifest(window: int, ratio: float) -> None:
    check = Check()
    with make_collector(job(agents=sampling(window, ratio), env={"numEnvs": 16}, framesPerBatch=64)) as collector:
        for version in range(1, 9):
            collector.weights.offer({"red": weights(version)}, version=version)
            collector.weights.apply()
        for _ in range(10):
            check.take(collector.collect(num_steps=16 * 40))
    drawn = Counter(check.played.values())
    past = min(window, 9)
    shares = {9 - past + i: (1 - ratio) / past for i in range(past)}
    shares[8] += ratio
    total = sum(drawn.values())
    assert total > 700
    assert set(drawn) == {version for version, share in shares.items() if share}
    # Five standard deviations.
    assert all(abs(drawn[v] / total - p) <= 5 * (p * (1 - p) / total) ** 0.5 for v, p in shares.items())


def test_a_version_in_play_outlives_its_window() -> None:
    check = Check()
    with make_collector(job(agents=sampling(1, 0.0), env={"kwargs": {"length": 30}})) as collector:
        for version in range(1, 12):
            check.take(collector.collect(num_steps=5))  # not every environment acts in every batch alike
            collector.weights.offer({"red": weights(version)}, version=version)
        check.take(collector.collect(num_steps=400))
        collector.weights.offer({"red": weights(12)}, version=12)
        check.take(collector.collect(num_steps=4))
        history = collector.actor._history["red"]
    assert set(check.played.values()) == {0, 11}
    assert set(history) == {11, 12}


def test_a_restored_collector_draws_the_same() -> None:
    check, played = Check(), []
    same = job(agents=sampling(8, 0.2), env={"kwargs": {"lengths": 1}})
    with make_collector(same) as collector:
        for version in range(1, 9):
            check.take(collector.collect(num_steps=60))
            collector.weights.offer({"red": weights(version)}, version=version)
        saved = collector.state()
        for _ in range(2):
            batch = collector.collect(num_steps=120)
            collector.restore(saved)
            batch = collector.collect(num_steps=120)
            check.take(batch)
            played.append(batch["collector", "blue", "policy_version"])
    assert torch.equal(*played)
    with make_collector(same) as collector:
        collector.weights.offer({"red": weights(8)}, version=8)
        collector.restore(saved, first_trajectory=1 << 40)
        check.take(collector.collect(num_steps=120))


def test_a_dataset_has_the_versions(tmp_path: Path) -> None:
    document = job(totalFrames=240)
    document["spec"]["output"] = {"dataset": {"uri": str(tmp_path / "data")}}
    with open_fleet(document, workers=1) as fleet:
        assert fleet.wait_until_done(120)
    (frames,) = read_dataset(str(tmp_path / "data")).frames(batch_size=240)
    check = Check()
    check.take(frames)
    assert set(check.played.values()) == {0}


@on_both_engines_slowly
def test_a_worker_that_comes_later_draws_from_the_window(engine: str) -> None:
    check, late = Check(), Check()
    document = job(agents=sampling(3, 0.0), framesPerBatch=240)
    fleet = LocalFleet(open_on(engine, load_job(document), FleetOptions(workers=1)))
    with fleet:
        for version in range(1, 7):
            check.take(fleet.next_batch(timeout=60))
            fleet.publish({"red": weights(version)}, wait=60)
        os.kill(fleet._fleet.stats().workers[0].pid, signal.SIGKILL)
        while (batch := fleet.next_batch(timeout=60)) is not None and len(late.played) < 100:
            check.take(batch)
            if fleet._fleet.stats().workers[0].attempt and (batch["collector", "red", "policy_version"] == 6).all():
                late.take(batch)
    assert set(late.played.values()) == {4, 5, 6}


def test_a_new_head_has_the_window_and_what_is_pinned(tmp_path: Path) -> None:
    pinned = {"red": {**NUMBERED, "version": 2}}
    document = job(agents=sampling(3, 0.0) | pinned, framesPerBatch=240)
    check = Check()
    for start in (0, 6):
        with (
            serve(load_job(document), directory=tmp_path, keep_versions=1) as served,
            connect(served.server.url, token=served.writer.token) as client,
        ):
            deliveries = client.deliveries(prefetch=0)
            for version in range(start + 1, 7):
                check.take(next(deliveries).tensordict())
                client.publish({"red": weights(version)}, wait=60)
            if start:
                late = Check()
                while len(late.played) < 100:
                    late.take(batch := next(deliveries).tensordict())
                    assert (batch["collector", "red", "policy_version"] == 2).all()
                assert set(late.played.values()) == {4, 5, 6}


def test_a_restored_fleet_has_the_window_and_what_is_pinned(tmp_path: Path) -> None:
    pinned = {"red": {**NUMBERED, "version": 2}}
    document = job(agents=sampling(2, 0.0) | pinned, framesPerBatch=240)
    with open_fleet(document, workers=1) as fleet:
        for version in (1, 3, 4):
            fleet.publish({"red": weights(version)}, version=version, wait=60)
        saved = fleet.state()
    check = Check()
    with open_fleet(document, workers=1) as fleet:
        fleet.restore(saved)
        while len(check.played) < 100:
            check.take(batch := fleet.next_batch(timeout=60))
            assert (batch["collector", "red", "policy_version"] == 1).all()
    assert set(check.played.values()) == {3, 4}
    with serve(load_job(document), directory=tmp_path) as served:
        assert served.writer.post("/v1/pauses", {"owner": "tests", "wait_seconds": 60}).json["state"] == "paused"
        assert served.writer.put("/v1/state", saved).status == 200
        kept = served.reader.get("/v1/models/red/versions").json["versions"]
        assert [one["version"] for one in kept] == [4, 3, 1]


def test_policies_and_random_actions_heed_masks() -> None:
    legal = {"entrypoint": "cormorant_testing.versions:legal"}
    players = {"player_0": legal} | {f"player_{number}": {"random": {}} for number in (1, 2, 3)}
    rounds = {"entrypoint": "cormorant_testing.agents:Rounds", "groups": "perAgent"}  # refuses other actions
    with make_collector(job(agents=players, env=rounds)) as collector:
        batch = collector.collect(num_steps=400)
    first = batch["player_0"]
    assert torch.equal(first["action"], first["action_mask"].long().argmax(-1))


def test_the_board_shows_which_players_policy_acted() -> None:
    document = job(agents={"player_0": {"entrypoint": "cormorant_testing.versions:legal"}, "player_1": {"random": {}}})
    document["spec"]["env"] = {"envpool": {"taskId": "ConnectFour-v1", "numEnvs": 4, "groups": "perAgent"}}
    with make_collector(document) as collector:
        batch = collector.collect(num_steps=400)
    moves = torch.stack([batch[player, "mask"][..., 0] for player in ("player_0", "player_1")])
    assert torch.equal(moves[0], ~moves[1])
    columns = []
    for player, is_turn in zip(("player_0", "player_1"), moves, strict=True):
        before, after = (at[player, "observation"][is_turn].sum((1, 2, 4)) for at in (batch, batch["next"]))
        assert (after - before == torch.nn.functional.one_hot(batch[player, "action"][is_turn][:, 0], 7)).all()
        columns.append((after - before).argmax(-1))
    legal = batch["player_0", "action_mask"][moves[0]][:, 0]
    assert torch.equal(columns[0], legal.long().argmax(-1))
    assert len(columns[1].unique()) == 7


@pytest.mark.parametrize(
    ("agents", "sentence"),
    [
        ({"red": NUMBERED}, "policy.agents has red, but the environment's groups are blue, gray, red"),
        (POLICIES | {"gray": {"model": "red"}}, "the group gray has the spaces .* entrypoint of its own"),
        (
            POLICIES | {"gray": {"entrypoint": "cormorant_testing.versions:scripted", "version": 0}},
            "policy.agents.gray has version or sample, but its policy has no weights",
        ),
    ],
)
def test_what_does_not_fit_is_refused(agents: Document, sentence: str) -> None:
    with pytest.raises(ManifestError, match=sentence):
        make_collector(job(agents=agents))


def test_a_script_says_the_policies_as_a_manifest_does() -> None:
    check = Check()
    with make_collector(env=Mirror, policy={"agents": POLICIES}, num_envs=4, seed=3) as collector:
        for _ in range(3):
            check.take(collector.collect(num_steps=60))
    assert set(check.played.values()) == {0}
