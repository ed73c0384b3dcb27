"""What frames and episodes hold beside observations and actions: declared keys of info, metrics of them, and variants:
who plays which, the id in every frame, spaces that must agree.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cormorant_contract.env import seating
from cormorant_contract.info import EpisodeMetric
from cormorant_testing.collecting import make_job
from cormorant_testing.info import INFO, METRICS, assert_info, expected_metrics
from cormorant_testing.stats import make_stats
from cormorant_testing.vectors import COUNTING, counting, step_times
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.trajectories import EpisodeMetrics
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.request import assign
from cormorant_worker.envs.single_envs import InlineVectorEnv
from cormorant_worker.errors import CormorantError, EnvBuildError
from cormorant_worker.launch import make_collector
from cormorant_worker.spaces import Leaf

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


def test_variants_are_shared_over_workers_or_within_one() -> None:
    job = make_job(num_envs=1, variants=[EASY, HARD], workers=9)
    assert [ids_of(job, index=index)[0] for index in range(9)] == [1, 0, 1] * 3
    assert ids_of(job, index=4, attempt=3, epoch=2, seed=9) == [0], "the slot alone decides"
    job = make_job(num_envs=6, variants=[EASY, HARD], workers=2, collection={"framesPerBatch": 24})
    assert ids_of(job, index=0) == ids_of(job, index=1) == [0, 0, 1, 1, 1, 1]
    groups = [ids_of(make_job(variants=[EASY, HARD]), index=0, group_number=group, num_groups=3) for group in range(3)]
    assert groups == [[0, 1], [0, 1], [1, 1]]


@pytest.mark.parametrize("num_steps", [60, 61])
def test_every_frame_has_the_id_of_its_variant(num_steps: int) -> None:
    with make_collector(make_job(num_envs=3, variants=[EASY, HARD], collection={"framesPerBatch": 30})) as collector:
        assert collector.layout(4).task_names == ("easy", "hard")
        for _ in range(2):
            batch = collector.collect(num_steps=num_steps)
        episodes = collector.collect(num_episodes=4)
    ids = batch["collector", "task_id"]
    assert (ids.dtype, ids.shape) == (torch.int64, batch.shape)
    mask = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
    assert ids.tolist() == (torch.tensor([[0], [1], [1]]) * mask).tolist()
    for column, length in zip(batch, (3, 7, 7), strict=True):
        ends = column["next", "done"].squeeze(-1).nonzero().squeeze(-1)
        assert set(ends.diff().tolist()) == {length}
    assert episodes["collector", "mask"].sum(dim=1).tolist() == [3, 3, 7, 7]
    assert episodes["collector", "task_id"][:, 0].tolist() == [0, 0, 1, 1]


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


# -- info ------------------------------------------------------------------------------------------------------


def test_info_belongs_to_its_own_step_and_is_padded_with_zeros() -> None:
    job = make_job(num_envs=3, lengths=(4, 3, 7), ends="alternate", info=INFO, collection={"framesPerBatch": 30})
    with make_collector(job) as collector:
        for frames in (30, 7, 30):
            assert_info(collector.collect(num_steps=frames))
        assert_info(collector.collect(num_episodes=7))


def info_of(field: Mapping[str, Any], info: Mapping[str, Any]) -> tuple[Any, Leaf]:
    env = InlineVectorEnv(counting(shown=info), seeds=[1], info=[InfoField(**field)])
    env.start()
    return step_times(env, 1).info[0], env.info_leaves[0]


@pytest.mark.parametrize(
    ("field", "info", "sentence"),
    [
        ({"key": "succes"}, {}, r"succes is in the info of neither .* where even, nested, pair, step"),
        ({"key": "word"}, {"word": "yes"}, "word is of type str96; numbers, booleans and arrays of them are stored"),
        ({"key": "word", "dtype": "float32", "shape": ()}, {"word": "yes"}, "word that does not fit float32.*: 'yes'"),
        ({"key": "pair", "shape": (3,)}, {}, r"pair has the shape \[2\], declared is \[3\]"),
        ({"key": "pair", "dtype": "int16", "shape": (3,)}, {}, r"pair that does not fit int16\[3\]: .* of shape \[2\]"),
        ({"key": "big", "dtype": "uint8"}, {"big": 300}, r"big that does not fit uint8\[\]: 300 .* stored as 44"),
        ({"key": "even", "fill": 2}, {}, "fill 2 of even does not fit bool"),
        ({"key": "far", "dtype": "float32", "shape": ()}, {"far": 1e300}, r"does not fit float32.*: 1e\+300 .* as inf"),
        ({"key": "far", "dtype": "float64", "shape": ()}, {"far": 10**400}, "does not fit float64.*: int too large"),
        ({"key": "far", "dtype": "int64", "shape": ()}, {"far": 2**70}, r"int64.*: 1\.1805\d*e\+21 .* another dtype"),
        ({"key": "far", "dtype": "int64", "shape": (2,)}, {"far": [2**70, 0]}, r"fit int64.*: 1\.1805\d*e\+21"),
    ],
)
def test_info_that_cannot_be_stored_gets_a_sentence(
    field: Mapping[str, Any], info: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(CormorantError, match=sentence):
        info_of(field, info)


@pytest.mark.parametrize(
    ("value", "dtype", "stored"),
    [
        (np.float64(0.1), "float32", np.float32(0.1)),
        ([2**70, 1], "float32", np.array([2**70, 1], np.float32)),
        (np.nan, "float32", np.float32(np.nan)),
        (np.array([np.inf, 1e38]), "float32", np.array([np.inf, 1e38], np.float32)),
        (np.array([1, 0]), "bool", np.array([True, False])),
        (np.uint8(255), "", np.uint8(255)),
        (2**70, "", np.float64(2**70)),
    ],
)
def test_numbers_are_stored_as_the_declared_dtype_or_their_own(value: Any, dtype: str, stored: Any) -> None:
    found, leaf = info_of({"key": "a", "dtype": dtype, "shape": np.shape(value) if dtype else None}, {"a": value})
    assert found.dtype == leaf.dtype == stored.dtype
    np.testing.assert_array_equal(found[0], stored)


# -- metrics of episodes, against the frames that they are made of ---------------------------------------------


def measuring(metrics: Any = METRICS, **options: Any) -> Collector:
    collection = {"framesPerBatch": 30, "episodeMetrics": list(metrics)} | options.pop("collection", {})
    defaults = {"num_envs": 3, "lengths": (4, 3, 7), "ends": "alternate", "info": INFO}
    return make_collector(make_job(**defaults | options, collection=collection))


def ended(block: Block) -> list[tuple[int, int]]:
    """(episode, length) of the episodes that ended in a block, in the order in which they ended."""
    return [(int(episode), int(step)) for _, episode, step, _ in block.final[0][: block.num_ends]]


def rows(metrics: Mapping[str, list[float]]) -> list[dict[str, float]]:
    return [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]


def test_metrics_are_those_of_whole_episodes() -> None:
    with measuring() as collector:
        played = []
        block = Block(collector.layout(11))
        for frames in (30, 7, 33, 1, 29):  # 7 and 1 are no multiple of 3: rows are uneven
            saved = collector.state()  # most environments are within an episode
            filled = collector.fill(block, frames)
            assert rows(filled.episodes.metrics) == [expected_metrics(*episode) for episode in ended(block)]
            played += filled.episodes.lengths
            collector.restore(saved)
            assert collector.fill(block, frames).episodes.metrics == filled.episodes.metrics
    assert len(played) > 15


def test_a_cut_trajectory_is_an_episode_of_its_frames() -> None:
    with measuring(collection={"maxFramesPerTrajectory": 2}) as collector:
        filled = collector.fill(Block(collector.layout(4)), 12)
    assert filled.episodes.lengths == [2] * 6
    assert filled.episodes.metrics["steps"] == [3.0] * 6
    assert filled.episodes.metrics["success"] == [0.0] * 6


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (np.float32, [np.nan, 1.0], {"last": 1.0, "sum": np.nan, "mean": np.nan, "max": np.nan, "any": np.nan}),
        (np.int8, [-128, 0], {"last": 0.0, "sum": -128.0, "mean": -64.0, "max": 0.0, "any": 1.0}),
    ],
)
def test_values_are_reduced_to_one_number(dtype: Any, values: list[float], expected: dict[str, float]) -> None:
    leaf = Leaf(key=("info", "hit"), shape=(), dtype=np.dtype(dtype))
    box = Leaf(key=("observation",), shape=(1,), dtype=np.dtype(np.float32))
    block = Block(Layout(num_rows=2, num_envs=1, observation=(box,), action=(), info=(leaf,)))
    block.begin(2)
    block.lengths[:], block.info[0][:, 0] = 2, values
    asked = [EpisodeMetric(name=how, key="hit", reduce=how) for how in expected]
    with pytest.raises(CormorantError, match=r"last reads hit, whose values have the shape \[2\]"):
        EpisodeMetrics(asked, (replace(leaf, shape=(2,)),), 1)
    metrics = EpisodeMetrics(asked, (leaf,), 1)
    found = metrics.of(block, np.array([1]), np.array([0]), lengths=np.array([2]))
    assert {how: value for how, (value,) in found.items()} == pytest.approx(expected, nan_ok=True)
    assert metrics.of_episode([block.info[0][:2, 0]]) == pytest.approx(expected, nan_ok=True)


def test_means_leave_out_what_is_no_number() -> None:
    stats = make_stats(recent={("a", ""): (1.0, float("nan"), 4.0, float("inf")), ("b", ""): (float("nan"),)})
    assert stats.metric_means == {"a": 2.5, "b": None}
