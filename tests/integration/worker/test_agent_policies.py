"""Policies of groups of agents: which version acted, told by the environment and not by the batch."""

from typing import Any

from cormorant_testing.versions import MIRROR, POLICIES, Check, weights
from cormorant_worker.launch import make_collector, open_fleet
from manifest_making import Document, manifest


def job(*, agents: Document | None = None, env: Document | None = None, **collection: Any) -> Document:
    document = manifest("mirror", env={"pettingzoo": MIRROR | (env or {})}, policy={"agents": agents or POLICIES})
    document["spec"]["collection"] = {"framesPerBatch": 60, "seed": 3, **collection}
    return document


def test_each_group_acts_with_its_own_policy() -> None:
    check = Check()
    with make_collector(job()) as collector:
        for version in range(1, 9):
            batch = collector.collect(num_steps=60)
            check.take(batch)
            assert (batch["collector", "red", "policy_version"] == version - 1).all()
            assert (batch["collector", "gray", "policy_version"] == -1).all()
            assert batch["red", "action_log_prob"].shape == (4, 15, 2)
            assert set(batch["gray", "action"].unique().tolist()) == {0, 1}
            collector.weights.offer({"red": weights(version)}, version=version)
    assert set(check.played.values()) == set(range(8))
    assert not {"policy_version", "drawn"} & set(batch.keys())


def test_a_fleet_hands_out_what_acted() -> None:
    check = Check()
    with open_fleet(job(totalFrames=960), workers=2) as fleet:
        for version, batch in enumerate(fleet.batches(), start=1):
            check.take(batch)
            fleet.publish({"red": weights(version)})
    assert len(set(check.played.values())) > 2
