"""Variants: who plays which, the id in every frame, spaces that must agree."""

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from cormorant_contract.env import seating
from cormorant_contract.spec import unplayed
from cormorant_testing.collecting import make_job
from cormorant_testing.vectors import COUNTING
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.request import assign
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.launch import make_collector

EASY, HARD = {"name": "easy", "kwargs": {"lengths": [3]}}, {"name": "hard", "kwargs": {"lengths": [7]}, "weight": 2}


def ids_of(job: Any, **place: int) -> list[int]:
    seat = WorkerPlace(**place)  # type: ignore[arg-type]  # numbers only
    assignment = assign(job.spec.env, group_number=seat.group_number, index=seat.index)
    assert assignment is not None
    return list(assignment.task_ids)


def test_seats_are_shared_by_weight() -> None:
    assert seating([1, 2]) == (1, 0, 1)
    assert seating([1, 1, 1]) == (0, 1, 2)
    assert seating([5, 1]) == (0, 0, 0, 1, 0, 0)
    for weights in ([7, 2, 1], [100, 30, 3], [1] * 64, [1000, 1]):
        seats = np.array(seating(weights))
        share = np.array(weights) / sum(weights)
        assert np.bincount(seats, minlength=len(weights)).tolist() == weights
        counts = np.cumsum(seats[:, None] == np.arange(len(weights)), axis=0)
        wanted = np.arange(1, len(seats) + 1)[:, None] * share
        assert np.abs(counts - wanted).max() <= 1


def test_workers_of_one_environment_share_the_variants() -> None:
    job = make_job(num_envs=1, variants=[EASY, HARD], workers=9)
    played = [ids_of(job, index=index)[0] for index in range(9)]
    assert played == [1, 0, 1] * 3
    assert ids_of(job, index=4, attempt=3, epoch=2, seed=9) == [0], "the slot alone decides"


def test_a_worker_of_many_environments_has_the_shares_itself() -> None:
    job = make_job(num_envs=6, variants=[EASY, HARD], workers=2, collection={"framesPerBatch": 24})
    assert ids_of(job, index=0) == ids_of(job, index=1) == [0, 0, 1, 1, 1, 1]
    groups = [ids_of(make_job(variants=[EASY, HARD]), index=0, group_number=group, num_groups=3) for group in range(3)]
    assert groups == [[0, 1], [0, 1], [1, 1]]
    assert Counter(chain(*groups)) == {0: 2, 1: 4}


@pytest.mark.parametrize(
    ("workers", "weights", "missing"),
    [(2, [3, 1], "v1"), (3, [3, 1], ""), (0, [1, 1], ""), (2, [9, 9, 1, 1], "v2, v3")],
)
def test_variants_without_an_environment_are_named(workers: int, weights: list[int], missing: str) -> None:
    variants = [{"name": f"v{i}", "weight": weight} for i, weight in enumerate(weights)]
    found = unplayed(make_job(num_envs=1, variants=variants, workers=workers).spec)
    wanted = (
        f"no environment plays the variants {missing}: the fleet has {workers} environments for {len(weights)} "
        "variants; raise numEnvs or the number of workers, or change the weights"
    )
    assert found == (wanted if missing else "")
    played = {"dataset": "results", "collection": {"episodes": {"count": 2}}}
    assert unplayed(make_job(num_envs=1, variants=variants, workers=workers, **played).spec) == ""


@pytest.mark.parametrize("num_steps", [60, 61])
def test_every_frame_has_the_id_of_its_variant(num_steps: int) -> None:
    with make_collector(make_job(num_envs=3, variants=[EASY, HARD], collection={"framesPerBatch": 30})) as collector:
        assert collector.layout(4).task_names == ("easy", "hard")
        for _ in range(2):
            batch = collector.collect(num_steps=num_steps)
    ids = batch["collector", "task_id"]
    assert (ids.dtype, ids.shape) == (torch.int64, batch.shape)
    mask = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
    assert ids.tolist() == (torch.tensor([[0], [1], [1]]) * mask).tolist()
    for column, length in zip(batch, (3, 7, 7), strict=True):
        ends = column["next", "done"].squeeze(-1).nonzero().squeeze(-1)
        assert set(ends.diff().tolist()) == {length}


def test_episodes_carry_the_task_too() -> None:
    with make_collector(make_job(num_envs=2, variants=[EASY, HARD | {"weight": 1}])) as collector:
        batch = collector.collect(num_episodes=4)
    assert batch["collector", "mask"].sum(dim=1).tolist() == [3, 3, 7, 7]
    assert batch["collector", "task_id"][:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        (
            {"observation": "dict"},
            r"different spaces: environment 1 \(variant odd\) .* 0 \(variant plain\)",
        ),
        ({"lengths": None}, f"variant odd: the environment {COUNTING} could not be built: TypeError"),
    ],
)
def test_what_a_variant_cannot_be_is_named(kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvBuildError, match=sentence):
        make_collector(make_job(num_envs=2, variants=[{"name": "plain"}, {"name": "odd", "kwargs": kwargs}]))
