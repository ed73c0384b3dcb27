"""Normalization: moments, what a batch adds to them, what a policy sees, and what a learner makes of it again."""

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from cormorant_contract.collection import Normalize
from cormorant_contract.metrics.head import HEAD_METRICS
from cormorant_postproc import PostprocError, normalized
from cormorant_testing.collecting import ExpectedMoments, make_collector, make_job
from cormorant_testing.policies import numbered
from cormorant_testing.stats import make_stats
from cormorant_worker.collect.batch import to_tensordict
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.collector import Collector
from cormorant_worker.collect.trajectories import BatchMoments
from cormorant_worker.errors import EnvError, ManifestError, StateError
from cormorant_worker.launch import make_collector as stand_alone
from cormorant_worker.metrics.exposition import Exposition
from cormorant_worker.metrics.fleet import FleetMetrics
from cormorant_worker.normalize import KEPT_VERSIONS, RunningMoments, Statistics, StatisticsBook
from cormorant_worker.policy.normalizer import Normalizer

BOTH = Normalize.model_validate({"observation": {}, "reward": {"gamma": 0.9}})
BOX = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)


def one(values: np.ndarray) -> Statistics:
    return Statistics({"observation": RunningMoments.of(values, clip=10.0)})


@given(
    values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60),
    offset=st.sampled_from([0.0, 1e4, -3e5]),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_moments_merge_to_numpys_in_any_partition_and_order(
    values: list[float], offset: float, cuts: list[int], order: Any
) -> None:
    whole = np.array(values).reshape(-1, 1) + offset
    parts = [RunningMoments.of(part) for part in np.split(whole, sorted(min(cut, len(whole)) for cut in cuts))]
    order.shuffle(parts)
    while len(parts) > 1:  # as a tree, and not only one after the other
        first, second = parts.pop(order.randrange(len(parts))), parts.pop(0)
        parts.append(first.merged(second))
    assert parts[0].count == len(whole)
    scale = max(1.0, abs(offset), np.abs(whole).max())
    assert np.abs(parts[0].mean - whole.mean(axis=0)).max() <= 1e-9 * scale
    assert np.abs(parts[0].m2 - len(whole) * whole.var(axis=0)).max() <= 1e-9 * scale * scale


def fill(collector: Collector, num_frames: int) -> tuple[Block, Any]:
    block = Block(collector.layout(-(-num_frames // collector.num_envs)))
    return block, collector.fill(block, num_frames)


def normalizing(**options: Any) -> Collector:
    collector = make_collector(**options)
    collector.moments = BatchMoments(Normalizer(BOTH, collector.spaces[0]), collector.num_envs)
    return collector


@pytest.mark.parametrize(
    "options",
    [{"lengths": 4}, {"lengths": (3, 7), "max_frames": 5}, {"lengths": 6, "resets": True}, {"lengths": 1000}],
    ids=str,
)
def test_batches_add_their_frames_also_after_a_restore(options: dict[str, Any]) -> None:
    expected, current = ExpectedMoments(), Statistics()
    with normalizing(num_envs=3, env_groups=2, **options) as collector:
        for num_frames in (12, 7, 1, 30, 2):  # whole rows, short ones, single columns
            block, filled = fill(collector, num_frames)
            current = current.merged(filled.moments)
            expected.take(to_tensordict(block))
        with normalizing(num_envs=3, env_groups=2, **options) as restored:
            fill(restored, 4)
            restored.restore(collector.state())
            assert fill(restored, 12)[1].moments.document() == fill(collector, 12)[1].moments.document()
    assert len(expected.seen) == 52
    expected.check(current)


def test_a_collector_alone_keeps_statistics_over_a_restore() -> None:
    collection = {"normalize": {"observation": {"clip": 3}}}
    job = make_job(policy="seer", action="box", num_envs=2, lengths=4, collection=collection)
    with stand_alone(job) as first, stand_alone(job) as second, stand_alone(job) as third:
        for version in (0, 1):
            if version:
                first.weights.offer({"policy": numbered(1)}, version=1)
            batch = first.collect(num_steps=8)
            assert torch.equal(normalized(batch, first.statistics)["observation"], batch["seen"])
            assert batch["collector", "policy_version"].unique().tolist() == [version]
        assert (first.statistics[1]["observation"]["count"], first.statistics.current.count) == (8, 16)
        saved = first.state()
        expected = first.collect(num_steps=8)
        second.restore(saved)
        second.weights.offer({"policy": numbered(1)}, version=1)
        found = second.collect(num_steps=8)
        assert torch.equal(found["observation"], expected["observation"])
        assert torch.equal(found["seen"], expected["seen"])
        assert second.statistics.current.document() == first.statistics.current.document()
        third.restore(saved)  # with the weights that it was built with
        found = third.collect(num_steps=8)
        assert torch.equal(normalized(found, third.statistics)["observation"], found["seen"])
        assert third.statistics[0] == first.statistics[1]


def test_a_value_that_is_no_number_is_named() -> None:
    with normalizing(num_envs=3, lengths=4) as collector:
        block, _ = fill(collector, 12)
        block.observation[0][2, 1, 0] = np.nan
        with pytest.raises(EnvError, match="an environment returned observation that is not finite"):
            collector.moments.of(block)


def test_policies_see_float32_normalized_and_clipped() -> None:
    space = gymnasium.spaces.Dict({"pos": BOX, "cam": gymnasium.spaces.Box(0, 255, (4, 4), np.uint8)})
    normalizer = Normalizer(Normalize.model_validate({"observation": {"clip": 2}}), space)
    assert normalizer.names == ("", "observation/pos")
    assert normalizer.space["pos"] == gymnasium.spaces.Box(-2, 2, (3,), np.float32)
    assert normalizer.space["cam"] == space["cam"]
    cam, pos = np.zeros((2, 4, 4), np.uint8), np.array([[1.0, 2.0, -9.0], [3.0, 2.0, 1.0]])
    same, raw = normalizer((cam, pos))  # nothing is known yet: raw values, clipped
    assert same is cam
    assert raw.tolist() == [[1.0, 2.0, -2.0], [2.0, 2.0, 1.0]]
    moments = RunningMoments(4, np.array([1.0, 2.0, 3.0]), np.array([16.0, 0.0, 4.0]), 2.0)
    normalizer.use(Statistics({"observation/pos": moments}))
    _, seen = normalizer((cam, pos))
    assert seen.dtype == np.float32
    assert seen.tolist() == [
        [0.0, 0.0, -2.0],
        [np.float32(2 / np.sqrt(4 + 1e-8)), 0.0, np.float32(-2.0 / np.sqrt(1 + 1e-8))],
    ]


@pytest.mark.parametrize(
    ("block", "space", "sentence"),
    [
        (
            {"observation": {}},
            gymnasium.spaces.Box(0, 255, (8, 8), np.uint8),
            "is for floating-point values, and the observation has uint8",
        ),
        ({"observation": {"keys": ["pos"]}}, BOX, "the observation has float64; remove it, or correct its keys"),
        ({"observation": {"keys": ["x"]}}, gymnasium.spaces.Dict({"pos": BOX}), "the observation has pos float64"),
        (
            {"observation": {"keys": ["n"]}},
            gymnasium.spaces.Dict({"n": gymnasium.spaces.Discrete(3), "pos": BOX}),
            "has n int64, pos float64",
        ),
    ],
    ids=["image", "no-keys", "unknown-key", "whole-numbers"],
)
def test_what_cannot_be_normalized_is_said(block: Any, space: Any, sentence: str) -> None:
    with pytest.raises(ManifestError, match=sentence):
        Normalizer(Normalize.model_validate(block), space)


def test_statistics_of_other_observations_are_refused() -> None:
    normalizer = Normalizer(BOTH, BOX)
    with pytest.raises(ManifestError, match=r"of shape \[2\], the environment's observation has shape \[3\]"):
        normalizer.use(one(np.ones((4, 2))))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([np.float32, np.float64]), scale=st.sampled_from([1, 1e4]))
def test_recomputed_bit_for_bit_from_the_document(seed: int, dtype: Any, scale: float) -> None:
    random = np.random.default_rng(seed)
    space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), dtype)
    normalizer = Normalizer(BOTH, space)
    versions = {v: one(random.normal(3.0, scale, (50, 3))) for v in (1, 2, 9)}
    obs_BT = random.normal(0.0, 2 * scale, (4, 5, 3)).astype(dtype)
    acted_BT = random.choice([1, 2, 9, -1], (4, 5))
    batch = TensorDict(
        {
            "observation": torch.from_numpy(obs_BT),
            "next": {"observation": torch.from_numpy(obs_BT[:, ::-1].copy()), "reward": torch.ones(4, 5, 1)},
            "collector": {"policy_version": torch.from_numpy(acted_BT)},
        },
        [4, 5],
    )
    documents = {v: Statistics(s.moments).document() for v, s in versions.items()}
    found = normalized(batch, documents)
    stacked = batch.copy().set("observation", batch["observation"].unsqueeze(2).expand(4, 5, 3, 3))
    assert (normalized(stacked, documents)["observation"] == found["observation"].unsqueeze(2)).all()
    for b in range(4):
        for t in range(5):
            normalizer.use(versions[9 if acted_BT[b, t] < 0 else int(acted_BT[b, t])])
            (seen,) = normalizer((obs_BT[b : b + 1, t],))
            assert found["observation"][b, t].numpy().tobytes() == seen.tobytes()
            (following,) = normalizer((obs_BT[b : b + 1, ::-1][:, t],))
            assert found["next", "observation"][b, t].numpy().tobytes() == following.tobytes()
    assert batch["observation"].dtype == torch.from_numpy(obs_BT).dtype  # the batch itself stays raw


def test_rewards_are_scaled_padding_is_zero_and_one_version_serves_all() -> None:
    with normalizing(num_envs=3, lengths=4) as collector:
        block, filled = fill(collector, 7)
        batch = to_tensordict(block)
    document = filled.moments.document()
    found = normalized(batch, document)
    std = np.sqrt(document["next/reward"]["m2"] / 7 + 1e-8)
    mask = batch["collector", "mask"]
    wanted = (batch["next", "reward"].double() / std).clamp(-10, 10).float() * mask[..., None]
    assert torch.equal(found["next", "reward"], wanted)
    assert not found["observation"][~mask].any()
    assert torch.equal(found["observation"], normalized(batch, {5: document})["observation"])  # random: the newest


def test_statistics_that_are_not_there_are_named() -> None:
    batch = TensorDict(
        {"observation": torch.ones(2, 2, 3), "collector": {"policy_version": torch.full((2, 2), 3)}}, [2, 2]
    )
    document = one(np.ones((4, 3))).document()
    with pytest.raises(PostprocError, match=r"version 3 are not among those given \(4 to 6\)"):
        normalized(batch, {4: document, 6: document})
    with pytest.raises(PostprocError, match=r"no statistics were given"):
        normalized(batch, None)  # what fleet.statistics is without `normalize`
    with pytest.raises(PostprocError, match=r"shape \[2, 2, 3\], its statistics \[4\]"):
        normalized(batch, one(np.ones((4, 4))).document())


def test_a_book_keeps_what_each_version_was_published_with() -> None:
    book = StatisticsBook()
    book.begin(one(np.ones((0, 1))))
    book.merge(one(np.array([[1.0], [3.0]])))
    book.stamp(1)
    book.merge(one(np.array([[5.0]])))
    assert book[0]["observation"]["count"] == 0
    assert book[1]["observation"] == {"count": 2, "mean": [2.0], "m2": [2.0], "clip": 10.0}
    assert book.current.document()["observation"] == {"count": 3, "mean": [3.0], "m2": [8.0], "clip": 10.0}
    assert list(book.between(-1, -1)) == [1]  # random frames: the newest
    for version in range(2, KEPT_VERSIONS + 10):
        book.stamp(version)
    assert list(book) == list(range(10, KEPT_VERSIONS + 10))


def test_a_book_goes_on_from_earlier_statistics_once() -> None:
    earlier, new = one(np.array([[1.0], [3.0]])), one(np.array([[5.0]]))
    book = StatisticsBook()
    book.begin(one(np.ones((0, 1))))
    book.merge(new)
    book.inherit(earlier)
    book.inherit(earlier)
    assert book.current.document() == earlier.merged(new).document()
    known = StatisticsBook(earlier)
    known.inherit(new)  # what this one began with is newer
    assert known.current.document() == earlier.document()


def test_documents_are_read_back_exactly_and_others_refused() -> None:
    statistics = one(np.random.default_rng(1).normal(size=(9, 3)))
    again = Statistics.of_document(json.loads(json.dumps(statistics.document())))
    assert again.document() == statistics.document()
    for wrong in ([], {"observation": {}}, {"observation": {"count": 1, "mean": [1.0], "m2": [-1.0], "clip": 1.0}}):
        with pytest.raises(StateError, match="not normalization statistics"):
            Statistics.of_document(wrong)


def test_a_glance_has_frames_and_the_ranges_of_each_key() -> None:
    book = StatisticsBook()
    assert book.glance() == {}
    values = np.array([[0.0, 10.0, -4.0], [2.0, 30.0, -4.0]])
    book.begin(one(values).emptied())
    book.merge(one(values))
    book.stamp(1)
    book.merge(one(values))
    (found,) = book.glance().values()
    low, high = np.sqrt(1e-8), np.sqrt(100 + 1e-8)
    assert (found.frames, found.published_frames, found.mean, found.std) == (4, 2, (-4.0, 20.0), (low, high))
    exposition = Exposition(HEAD_METRICS, collectorjob="counting")
    FleetMetrics(make_job(), exposition).sample(make_stats(statistics=book.glance()))
    lines = exposition.text().decode().splitlines()
    shown = [line.partition("{")[2].replace('collectorjob="counting",', "") for line in lines if "normalize_" in line]
    assert [line for line in shown if line] == [
        'key="observation"} 4.0',
        'key="observation"} 2.0',
        'bound="lowest",key="observation"} -4.0',
        'bound="highest",key="observation"} 20.0',
        f'bound="lowest",key="observation"}} {low}',
        f'bound="highest",key="observation"}} {high}',
    ]


def test_one_value_has_no_spread_yet() -> None:
    moments = RunningMoments.of(np.full((1, 2), 5.0))
    assert (moments.center.tolist(), moments.std.tolist()) == ([0, 0], [1, 1])
