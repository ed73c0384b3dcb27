from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from cormorant_postproc import FrameStack, MultiStep, Pipeline, PostprocError, RewardClip, split_trajectories
from cormorant_postproc.pipeline import in_bfloat16, of_collection
from cormorant_testing.postproc_oracle import Frame, Row, rows, to_batch


@given(
    collectors=st.lists(st.lists(st.integers(1, 6), min_size=12, max_size=12), min_size=1, max_size=4),
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.tuples(st.integers(0, 5), st.integers(0, 5)), st.booleans()),
        min_size=1,
        max_size=9,
    ),
    n=st.integers(1, 5),
)
@settings(max_examples=60)
def test_one_stack_serves_several_collectors(
    collectors: list[list[int]], turns: list[tuple[int, tuple[int, int], bool]], n: int
) -> None:
    """It is a loop over each trajectory, over any batches, split or not."""
    # As asynchronous collectors deliver: collector c gives two rows, of its streams 2c and 2c + 1.
    streams = [stream(number, lengths) for number, lengths in enumerate(collectors + collectors)]
    given = [0] * len(streams)
    stack = FrameStack(n)
    for turn, most, is_split in turns:
        rows_of = [turn % len(collectors), turn % len(collectors) + len(collectors)]
        parts = [streams[row][given[row] : given[row] + size] for row, size in zip(rows_of, most, strict=True)]
        if not any(parts):
            continue
        batch = to_batch(parts)
        found = stack(split_trajectories(batch) if is_split else batch)
        mask = found.get(("collector", "mask"), torch.ones(found.shape, dtype=torch.bool))
        expected = []
        for row, part in zip(rows_of, parts, strict=True):
            for at in range(given[row], given[row] + len(part)):
                past = [frame.observation for frame in streams[row][: at + 1] if frame.traj == streams[row][at].traj]
                later = [past[0]] * n + past + [streams[row][at].following]
                expected.append((([past[0]] * n + past)[-n:], later[-n:]))
            given[row] += len(part)
        stacks = found["observation"][mask][..., 0].tolist(), found["next", "observation"][mask][..., 0].tolist()
        assert list(zip(*stacks, strict=True)) == expected


def test_batches_of_all_collectors_at_once_keep_their_shape() -> None:
    row, other = stream(0, [4]), stream(1, [4])
    stack = FrameStack(2)
    for begin in (0, 2):
        batch = to_batch([row[begin : begin + 2], other[begin : begin + 2]]).reshape(2, 1, 2)
        found = stack(batch)
        assert found.shape == (2, 1, 2)
    assert found["observation"][..., 0].tolist() == [[[[1.0, 2.0], [2.0, 3.0]]], [[[1001.0, 1002.0], [1002.0, 1003.0]]]]


def test_ended_trajectories_are_forgotten() -> None:
    stack = FrameStack(2)
    stack(to_batch([stream(0, [3])]))
    assert stack._open is None
    stack(to_batch([stream(5, [3])[:2]]))
    long = stream(6, [2000])
    for number in range(1100):
        stack(to_batch([long[number : number + 1]]))
    assert stack._open is not None
    assert stack._open["ids"].tolist() == [600]


def test_padding_ends_no_trajectory_of_its_id() -> None:
    stack, row = FrameStack(2), stream(0, [6])  # trajectory 0: padding has zeros for ids
    stack(to_batch([row[:2]]))
    stack(to_batch([stream(5, [4])[:2], []]))
    found = stack(to_batch([row[2:4]]))["observation"]
    assert found[0, 0, :, 0].tolist() == [row[1].observation, row[2].observation]


def stream(number: int, lengths: Sequence[int]) -> Row:
    found: Row = []
    for episode, length in enumerate(lengths):
        traj = 100 * number + episode
        for i in range(length):
            ends = i == length - 1
            found.append(Frame(traj, 10.0 * traj + i, 10.0 * traj + i + (0.5 if ends else 1.0), 1.0, ends, False))
    return found


def test_stack_forgets_on_request_and_refuses_bad_batches() -> None:
    row = stream(0, [5])
    stack = FrameStack(2)
    stack(to_batch([row[:2]]))
    assert stack(to_batch([row[2:4]]))["observation"][0, 0, :, 0].tolist() == [1.0, 2.0]
    stack.forget()
    assert stack(to_batch([row[4:]]))["observation"][0, 0, :, 0].tolist() == [4.0, 4.0]
    with pytest.raises(PostprocError, match="num_frames 0"):
        FrameStack(0)
    with pytest.raises(PostprocError, match="the batch has no pixels"):
        FrameStack(2, keys=("pixels",))(to_batch([row]))
    with pytest.raises(PostprocError, match="must be time"):
        FrameStack(2)(to_batch([row])[0, 0])


@given(found=rows(), low=st.integers(-3, 0), high=st.integers(0, 3))
@settings(max_examples=30)
def test_rewards_are_clipped_and_nothing_else(found: list[Row], low: int, high: int) -> None:
    batch = to_batch(found)
    before = batch.clone()
    result = RewardClip(low, high)(batch)
    for b, row in enumerate(found):
        for t, frame in enumerate(row):
            assert float(result["next", "reward"][b, t]) == min(max(frame.reward, low), high)
    assert (batch == before).all()
    rest = ("next", "reward")
    assert (result.exclude(rest) == before.exclude(rest)).all()
    with pytest.raises(PostprocError, match="low 2 is above high 1"):
        RewardClip(2, 1)


@given(found=rows(), n=st.integers(1, 5))
@settings(max_examples=30)
def test_targets_before_or_after_the_split_are_the_same(found: list[Row], n: int) -> None:
    steps = MultiStep(0.9, n)
    first = Pipeline([steps, split_trajectories])(to_batch(found))
    last = Pipeline([split_trajectories, steps])(to_batch(found))
    mask = first["collector", "mask"]
    for key in (("next", "reward"), ("next", "observation"), ("next", "done"), "steps_to_next_obs", "nonterminal"):
        torch.testing.assert_close(first[key][mask], last[key][mask])
    assert (Pipeline([])(first) == first).all()


def test_bfloat16_keeps_every_bit_and_the_batch_as_it_is() -> None:
    every = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
    numbers = every[~every.isnan()][None]
    batch = TensorDict({"extra": {"logits": numbers.float()}}, [1])
    result = of_collection({"bfloat16": ["extra.logits"]})(batch)
    assert torch.equal(result["extra", "logits"].view(torch.int16), numbers.view(torch.int16))
    assert batch["extra", "logits"].dtype == torch.float32
    nan = in_bfloat16(TensorDict({"x": torch.tensor([torch.nan])}, [1]), ["x"])["x"]
    assert nan.dtype == torch.bfloat16
    assert nan.isnan().all()


def test_bfloat16_refuses_what_it_would_round_and_what_is_not_there() -> None:
    batch = TensorDict({"x": torch.tensor([1.0, 0.1])}, [2])
    with pytest.raises(PostprocError, match=r"x holds 0\.1\d+, which bfloat16 would round to 0\.1\d+"):
        in_bfloat16(batch, ["x"])
    with pytest.raises(PostprocError, match=r"collection\.bfloat16 names y, which the batch does not have"):
        in_bfloat16(batch, ["y"])
