"""Batches of known trajectories, and what post-processing makes of them, beside plain Python: loops, no tensors."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from cormorant_postproc import (
    FrameStack,
    MultiStep,
    PostprocError,
    RewardClip,
    frames_of,
    split_trajectories,
)
from cormorant_postproc.steps import in_bfloat16, of_collection


@dataclass(frozen=True)
class Frame:
    """One frame of a row. Observations are numbers, so that a wrong one is seen."""

    traj: int
    observation: float
    following: float
    reward: float
    terminated: bool
    truncated: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


Row = list[Frame]


@st.composite
def rows(draw: Any) -> list[Row]:
    """Rows of frames: trajectories of any lengths, ends of any kind, the last one open or ended."""
    steps = draw(st.integers(1, 12))
    found: list[Row] = []
    traj = draw(st.integers(0, 5))
    for number in range(draw(st.integers(1, 4))):
        length = draw(st.integers(0, steps)) if number else steps
        row: Row = []
        while len(row) < length:
            piece = draw(st.integers(1, length - len(row)))
            ends = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
            is_open = len(row) + piece == length and draw(st.booleans())
            for i in range(piece):
                flags = (False, False) if is_open or i < piece - 1 else ends
                value = 1000.0 * traj + i
                reward = float(draw(st.integers(-8, 8)))
                row.append(Frame(traj, value, value + (0.5 if any(flags) else 1.0), reward, *flags))
            traj += draw(st.integers(1, 3))
        found.append(row)
    return found


def to_batch(found: Sequence[Row], *, feature: bool = True, time_major: bool = True) -> TensorDict:
    """A batch `[B, T]`, masked when rows differ in length; views of time-major memory, as collectors make."""
    steps = max(len(row) for row in found)

    def leaf(name: str, dtype: torch.dtype, *, wide: bool = False) -> torch.Tensor:
        value = torch.zeros(len(found), steps, dtype=dtype)
        for b, row in enumerate(found):
            for t, frame in enumerate(row):
                value[b, t] = getattr(frame, name)
        value = value.t().contiguous().t() if time_major else value
        return value.unsqueeze(-1) if wide else value

    observation = leaf("observation", torch.float32)
    batch = {
        "observation": torch.stack([observation, -observation], -1),
        "next": {
            "observation": torch.stack([leaf("following", torch.float32), -leaf("following", torch.float32)], -1),
            **{name: leaf(name, torch.bool, wide=feature) for name in ("done", "terminated", "truncated")},
            "reward": leaf("reward", torch.float64, wide=feature),
        },
        "collector": {"traj_ids": leaf("traj", torch.int64)},
    }
    made = TensorDict(batch, batch_size=[len(found), steps], names=[None, "time"])
    if any(len(row) < steps for row in found):
        mask = torch.zeros(len(found), steps, dtype=torch.bool)
        for b, row in enumerate(found):
            mask[b, : len(row)] = True
        made["collector", "mask"] = mask
    return made


def pieces(found: Sequence[Row]) -> list[list[tuple[int, int]]]:
    """(row, step) of every frame, one list a piece, in the order of rows and time."""
    made: list[list[tuple[int, int]]] = []
    for b, row in enumerate(found):
        for t, frame in enumerate(row):
            if t == 0 or row[t - 1].traj != frame.traj:
                made.append([])
            made[-1].append((b, t))
    return made


def look_ahead(row: Row, t: int, n: int) -> int:
    """k: how many frames, frame t included, a target of n steps takes."""
    k = 1
    while k < n and t + k < len(row) and not row[t + k - 1].done:
        k += 1
    return k


GAMMAS = st.sampled_from([0.5, 0.9, 1.0])


@given(found=rows(), n=st.integers(1, 14), gamma=GAMMAS, feature=st.booleans())
@settings(max_examples=80)
def test_every_target_is_what_a_loop_over_the_frames_makes(
    found: list[Row], n: int, gamma: float, feature: bool
) -> None:
    batch = to_batch(found, feature=feature)
    before = batch.clone()
    result = MultiStep(gamma=gamma, n_steps=n)(batch)
    for b, row in enumerate(found):
        for t, frame in enumerate(row):
            k = look_ahead(row, t, n)
            target = row[t + k - 1]
            summed = sum(gamma**i * row[t + i].reward for i in range(k))
            assert float(result["next", "reward"][b, t]) == pytest.approx(summed, abs=1e-9)
            assert float(result["next", "original_reward"][b, t]) == frame.reward
            assert result["next", "observation"][b, t].tolist() == [target.following, -target.following]
            for name in ("done", "terminated", "truncated"):
                assert bool(result["next", name][b, t]) == getattr(target, name)
            assert int(result["steps_to_next_obs"][b, t]) == k
            assert float(result["gamma"][b, t]) == pytest.approx(gamma**k)
            assert bool(result["nonterminal"][b, t]) is not target.terminated
        for t in range(len(row), batch.shape[1]):
            assert not result["nonterminal"][b, t]
            assert float(result["next", "reward"][b, t]) == 0
    assert (batch == before).all()  # nothing in place
    assert (result["observation"] == before["observation"]).all()


def test_several_batch_dimensions_and_rewards_of_several_agents() -> None:
    reward = torch.arange(2 * 3 * 5 * 2, dtype=torch.float32).reshape(2, 3, 5, 2)
    done = torch.zeros(2, 3, 5, 1, dtype=torch.bool)
    done[:, :, 2] = True
    step = MultiStep(gamma=1.0, n_steps=2)
    assert step.to("cpu") is step, "as scripts move TorchRL's"
    result = step(TensorDict({"next": {"reward": reward, "done": done}}, batch_size=[2, 3, 5]))
    expected = reward.clone()
    for t in (0, 1, 3):
        expected[:, :, t] += reward[:, :, t + 1]
    assert torch.equal(result["next", "reward"], expected)


# Flags of an agent, of which there are two, by frame: t terminated, T truncated, as long as it is gone.
@pytest.mark.parametrize(
    ("flags", "end", "steps"),
    [
        ("..ttttt", 6, "3333321"),
        ("..Ttttt", 6, "3213321"),
        ("TTTTTTT", 6, "1333321"),
        ("..tt...", 6, "3321321"),
        ("...TTtt", 3, "3321121"),
    ],
)
def test_joined_steps_end_with_the_truncation_of_an_agent(flags: str, end: int, steps: str) -> None:
    gone, truncated, done = (torch.tensor([[c in some for c in flags]])[..., None] for some in ("tT", "T", ""))
    done[:, end] = True
    pair = {"mask": gone, "done": torch.stack([done, gone], -2), "truncated": torch.stack([done, truncated], -2)}
    following = {"reward": torch.ones(1, len(flags), 1), "done": done, "pair": pair}
    result = MultiStep(gamma=0.5, n_steps=3)(TensorDict({"next": following}, batch_size=[1, len(flags)]))
    assert "".join(map(str, result["steps_to_next_obs"][0].tolist())) == steps


def test_bad_arguments_and_batches_are_refused_by_a_sentence() -> None:
    for gamma in (0.0, 1.1, float("nan")):
        with pytest.raises(PostprocError, match=f"gamma {gamma} is out of range"):
            MultiStep(gamma=gamma, n_steps=3)
    for n_steps in (0, 1.5):
        with pytest.raises(PostprocError, match=f"n_steps {n_steps} is not a number of steps"):
            MultiStep(gamma=0.9, n_steps=n_steps)  # type: ignore[arg-type]  # a script's mistake
    with pytest.raises(PostprocError, match=r"the batch has no next\.done; it has \['next\.reward'\]"):
        MultiStep(0.9, 2)(TensorDict({"next": {"reward": torch.ones(4)}}, batch_size=[4]))
    following = {"reward": torch.ones(4, 3), "done": torch.zeros(4, 3, 2, dtype=torch.bool)}
    with pytest.raises(PostprocError, match=r"next\.done has shape \[4, 3, 2\]"):
        MultiStep(0.9, 2)(TensorDict({"next": following}, batch_size=[4, 3]))


@given(found=rows(), time_major=st.booleans())
@settings(max_examples=60)
def test_every_piece_is_one_padded_row_in_order(found: list[Row], time_major: bool) -> None:
    expected = pieces(found)
    result = split_trajectories(batch := to_batch(found, time_major=time_major))
    assert tuple(result.shape) == (len(expected), max(map(len, expected)))
    assert result.names == [None, "time"]
    for n, piece in enumerate(expected):
        assert result["collector", "mask"][n].tolist() == [t < len(piece) for t in range(result.shape[1])]
        for t, (b, at) in enumerate(piece):
            frame = found[b][at]
            assert result["observation"][n, t].tolist() == [frame.observation, -frame.observation]
            assert float(result["next", "reward"][n, t]) == frame.reward
            assert bool(result["next", "terminated"][n, t]) == frame.terminated
            assert int(result["collector", "traj_ids"][n, t]) == frame.traj
        padding = result[n, len(piece) :]
        assert all(not leaf.any() for leaf in padding.values(True, True))
    if ("collector", "mask") not in batch.keys(True):
        by_ends = split_trajectories(batch.exclude("collector"))  # without ids
        assert by_ends["collector", "traj_ids"][:, 0].tolist() == list(range(len(expected)))


def test_rows_with_the_same_id_stay_apart() -> None:
    # Two workers that number from 0: their frames must not become one trajectory.
    batch = TensorDict({"x": torch.arange(6).reshape(2, 3), "traj": torch.zeros(2, 3)}, batch_size=[2, 3])
    result = split_trajectories(batch, trajectory_key="traj")
    assert result["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert result["mask"].all()
    assert result["x"].data_ptr() == batch["x"].data_ptr()  # whole rows are not copied


@pytest.mark.parametrize(
    ("ids", "mask", "pieces_"),
    [
        ([[1, 1], [0, 0], [2, 3]], [[1, 1], [0, 0], [1, 1]], [[0, 1], [4, 0], [5, 0]]),  # as many pieces as rows
        ([[1, 1, 1, 1]], [[1, 0, 1, 1]], [[0, 0], [2, 3]]),  # a gap divides a trajectory
    ],
)
def test_masked_frames_are_in_no_piece(ids: list[list[int]], mask: list[list[int]], pieces_: list[list[int]]) -> None:
    collector = {"traj_ids": torch.tensor(ids), "mask": torch.tensor(mask, dtype=torch.bool)}
    x = torch.arange(collector["mask"].numel()).reshape(collector["mask"].shape).to(torch.uint16)
    batch = TensorDict({"x": x, "collector": collector}, batch_size=x.shape)
    assert split_trajectories(batch)["x"].tolist() == pieces_


def test_time_grows_with_frames_and_the_host_learns_sizes_only() -> None:
    # A program that asks the device once a trajectory would ask 3,277 times here.
    steps = torch.arange(1024).expand(64, 1024)
    ids = steps // 20 + 100 * torch.arange(64).unsqueeze(-1)
    batch = TensorDict({"x": steps.clone(), ("collector", "traj_ids"): ids}, batch_size=[64, 1024])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert tuple(split_trajectories(batch).shape) == (64 * 52, 20)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::item", 0) < 10
    assert sum(calls.values()) < 300


def test_stacks_ask_the_device_no_more_often_for_many_rows() -> None:
    parts, stack = [stream(number, [4]) for number in range(64)], FrameStack(2)
    stack(to_batch([part[:2] for part in parts]))
    batch = to_batch([part[2:3] for part in parts])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert stack(batch)["observation"].shape[:3] == (64, 1, 2)
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::item") < 10
    assert stack(batch[:0]).shape == (0, 1)


def test_what_cannot_be_split_is_refused_by_a_sentence() -> None:
    batch = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    with pytest.raises(PostprocError, match=r"the batch has no next\.done; it has \['x'\]"):
        split_trajectories(batch)
    empty = {"traj_ids": torch.ones(2, 2), "mask": torch.zeros(2, 2, dtype=torch.bool)}
    with pytest.raises(PostprocError, match=r"\[2, 2\] contains no frames"):
        split_trajectories(TensorDict({"collector": empty}, batch_size=[2, 2]))
    numbers = TensorDict({"collector": {"mask": torch.ones(2, 2, dtype=torch.int64)}}, batch_size=[2, 2])
    with pytest.raises(PostprocError, match=r"collector\.mask is torch\.int64; expected torch\.bool"):
        frames_of(numbers)


def test_torchrls_arguments_mean_what_they_mean_there() -> None:
    ids = torch.tensor([[0, 0, 1], [2, 2, 2]])
    batch = TensorDict({"x": torch.arange(6).reshape(2, 3), ("mine", "traj_ids"): ids}, batch_size=[2, 3])
    padded = split_trajectories(batch, prefix="mine")
    assert padded["x"].tolist() == [[0, 1, 0], [2, 0, 0], [3, 4, 5]]
    assert frames_of(padded)["x"].tolist() == [0, 1, 2, 3, 4, 5], "padding is no frame, wherever the ids are"
    nested = split_trajectories(batch, prefix="mine", as_nested=True)
    assert nested.shape == (3, -1)
    assert torch.equal(nested["x"].to_padded_tensor(0), padded["x"])
    with pytest.raises(PostprocError, match="the batch is nested; split it without as_nested"):
        frames_of(nested)


FORMS: dict[str, Callable[[TensorDict], TensorDict]] = {
    "rows": TensorDict.copy,
    "split": split_trajectories,
    "of all collectors": lambda batch: batch.reshape(2, 1, -1),
}


@given(
    collectors=st.lists(st.lists(st.integers(1, 6), min_size=12, max_size=12), min_size=1, max_size=4),
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.tuples(st.integers(0, 5), st.integers(0, 5)), st.sampled_from(sorted(FORMS))),
        min_size=1,
        max_size=9,
    ),
    n=st.integers(1, 5),
)
@settings(max_examples=60)
def test_one_stack_serves_several_collectors(
    collectors: list[list[int]], turns: list[tuple[int, tuple[int, int], str]], n: int
) -> None:
    """It is a loop over each trajectory, over any batches in any form."""
    # As asynchronous collectors deliver: collector c gives two rows, of its streams 2c and 2c + 1.
    streams = [stream(number, lengths) for number, lengths in enumerate(collectors + collectors)]
    given = [0] * len(streams)
    stack = FrameStack(n)
    for turn, most, form in turns:
        rows_of = [turn % len(collectors), turn % len(collectors) + len(collectors)]
        parts = [streams[row][given[row] : given[row] + size] for row, size in zip(rows_of, most, strict=True)]
        if not any(parts):
            continue
        batch = FORMS[form](to_batch(parts))
        found = stack(batch)
        assert found.shape == batch.shape
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


def test_ended_trajectories_are_forgotten() -> None:
    stack = FrameStack(2)
    stack(to_batch([stream(0, [3])]))
    assert stack._open == {}
    stack(to_batch([stream(5, [3])[:2]]))
    long = stream(6, [2000])
    for number in range(1100):
        stack(to_batch([long[number : number + 1]]))
    assert list(stack._open) == [600]


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
    with pytest.raises(PostprocError, match="keys is 'observation'; name the leaves"):
        FrameStack(2, keys="observation")
    with pytest.raises(PostprocError, match="the batch has no pixels"):
        FrameStack(2, keys=("pixels",))(to_batch([row]))
    with pytest.raises(PostprocError, match="must be time"):
        FrameStack(2)(to_batch([row])[0, 0])
    two = to_batch([row[:3], [replace(frame, traj=1) for frame in row[:3]]])
    interleaved = two.transpose(0, 1).reshape(-1)  # as a dataset's frames()
    for step, flat in itertools.product((FrameStack(2), MultiStep(0.9, 2)), (frames_of(two), interleaved)):
        with pytest.raises(PostprocError, match="trajectory changes where none ends"):
            step(flat)
        step(two[1])
    joined = MultiStep(0.9, 2)(to_batch([row]))
    for again in (FrameStack(2), MultiStep(0.9, 2)):
        with pytest.raises(PostprocError, match="apply MultiStep once, after FrameStack"):
            again(joined)


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


@pytest.mark.gpu
def test_the_gpu_gives_what_the_cpu_gives() -> None:
    done = torch.rand(8, 50, 1) < 0.1
    following = {"reward": torch.randn(8, 50, 1), "done": done, "terminated": done}
    ids = torch.randint(0, 2, (8, 50)).cumsum(-1)
    batch = TensorDict(
        {"x": torch.randn(8, 50, 3), "next": following, ("collector", "traj_ids"): ids}, batch_size=[8, 50]
    )
    for step in (MultiStep(0.9, 5), split_trajectories):
        here, there = step(batch), step(batch.to("cuda")).cpu()
        for key in here.keys(True, True):
            torch.testing.assert_close(here[key], there[key])
