"""Random actions and probes keep to the action masks that environments give."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from cormorant_postproc import frames_of
from cormorant_testing.masks import Masked, MaskedAtTimes
from cormorant_worker.action_mask import ObservedActionMask
from cormorant_worker.launch import make_collector
from cormorant_worker.policy.random_actor import RandomActor


@pytest.mark.parametrize("in_info", [False, True])
@pytest.mark.parametrize("vectorization", ["inline", "subprocess"])
@pytest.mark.parametrize("warmup", [False, True])
def test_random_frames_and_probes_take_legal_actions_only(*, warmup: bool, vectorization: Any, in_info: bool) -> None:
    collection = {"initRandomFrames": 300, "resetAtEachBatch": True} if warmup else {"maxFramesPerTrajectory": 7}
    with make_collector(
        env=partial(Masked, in_info=in_info),
        policy="cormorant.policies:mlp" if warmup else None,
        num_envs=3,
        vectorization_mode=vectorization,
        info=["chosen"],
        collection=collection,
    ) as collector:
        batches = [collector.collect(num_steps=num_steps) for num_steps in (100, 200)]
        assert collector.env_restarts == 0
    frames = [frames_of(batch) for batch in batches]
    assert set(torch.cat([part["action"] for part in frames]).tolist()) == {10, 11, 12, 13, 14}
    for part in frames:
        assert torch.equal(part["next", "info", "chosen"], part["action"])


def test_a_mask_in_info_reaches_the_observation() -> None:
    def make() -> Any:
        return ObservedActionMask(Masked(in_info=True))

    with make_collector(env=make, num_envs=2, info=["chosen"]) as collector:
        batch = collector.collect(num_steps=200)
        assert collector.env_restarts == 0
    legal = batch["observation", "action_mask"].gather(-1, (batch["action"] - 10).unsqueeze(-1))
    assert bool((legal == 1).all())


@pytest.mark.parametrize("vectorization", ["inline", "subprocess"])
def test_a_restored_collector_keeps_to_the_masks_of_the_info(vectorization: Any) -> None:
    with make_collector(env=MaskedAtTimes, num_envs=3, vectorization_mode=vectorization) as collector:
        collector.collect(num_steps=11)
        state = collector.state()
        first = collector.collect(num_steps=91)
        collector.restore(state)
        again = collector.collect(num_steps=91)
        assert collector.env_restarts == 0
    assert torch.equal(first["action"], again["action"])
    assert len(frames_of(first)["action"].unique(dim=0)) == 6


@pytest.mark.parametrize(
    ("space", "mask", "legal"),
    [
        (spaces.Discrete(4), [0, 1, 0, 1], {1, 3}),
        (spaces.Discrete(3, start=-1), [0, 0, 1], {1}),
        (spaces.Discrete(3, start=7), [0, 0, 0], {7}),  # as gymnasium's sample
        (spaces.MultiDiscrete([2, 3]), [1, 0, 0, 1, 1], {(0, 1), (0, 2)}),
        (spaces.MultiDiscrete([[2], [2]]), [1, 1, 0, 1], {((0,), (1,)), ((1,), (1,))}),
    ],
    ids=str,
)
def test_masked_actions_are_uniform_over_legal_ones(space: Any, mask: list[int], legal: set[Any]) -> None:
    n = 4000
    masks = np.tile(np.array(mask, np.int8), (n, 1))
    observation = spaces.Dict(action_mask=spaces.MultiBinary(len(mask)), pos=spaces.Box(0, 1, (2,)))
    actor = RandomActor(space, 1, observation=observation)
    (drawn,) = actor.act((masks, np.zeros((n, 2), np.float32)), (), np.zeros(n, np.bool_)).actions
    assert drawn.dtype == space.dtype
    found, counts = np.unique(drawn.reshape(n, -1), axis=0, return_counts=True)
    assert {_nested(row.reshape(space.shape).tolist()) for row in found} == legal
    assert (abs(counts - n / len(legal)) < 6 * np.sqrt(n)).all()


def _nested(value: Any) -> Any:
    return tuple(_nested(item) for item in value) if isinstance(value, list) else value


def test_random_actions_without_a_mask_are_as_before() -> None:
    space, rows = spaces.Discrete(5), np.zeros(8, np.bool_)
    plain = RandomActor(space, 3).act((), (), rows).actions[0]
    observation = spaces.Dict(action_mask=spaces.Box(0, 1, (4,), np.int8))  # of another length
    other = RandomActor(space, 3, observation=observation).act((np.zeros((8, 4), np.int8),), (), rows).actions[0]
    assert plain.tolist() == other.tolist()
