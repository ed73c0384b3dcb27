import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from cormorant_postproc import PostprocError, split_trajectories
from cormorant_testing.postproc_oracle import Row, pieces, rows, to_batch


@given(found=rows(), time_major=st.booleans())
@settings(max_examples=60)
def test_every_piece_is_one_padded_row_in_order(found: list[Row], time_major: bool) -> None:
    expected = pieces(found)
    result = split_trajectories(to_batch(found, time_major=time_major))
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


@given(found=rows(padded=False))
@settings(max_examples=40)
def test_without_ids_ends_divide_trajectories(found: list[Row]) -> None:
    batch = to_batch(found).exclude(("collector", "traj_ids"), "collector")
    result = split_trajectories(batch)
    expected = pieces(found)
    # An end is seen in the frame that ended; two pieces without one between them would be one.
    assert len(result) == len(expected)
    assert [int(ids[0]) for ids in result["collector", "traj_ids"]] == list(range(len(expected)))


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
    x = torch.arange(collector["mask"].numel()).reshape(collector["mask"].shape)
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


def test_what_cannot_be_split_is_refused_by_a_sentence() -> None:
    batch = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    with pytest.raises(PostprocError, match=r"the batch has no next\.done; it has \['x'\]"):
        split_trajectories(batch)
    empty = {"traj_ids": torch.ones(2, 2), "mask": torch.zeros(2, 2, dtype=torch.bool)}
    with pytest.raises(PostprocError, match=r"\[2, 2\] contains no frames"):
        split_trajectories(TensorDict({"collector": empty}, batch_size=[2, 2]))


def test_torchrls_arguments_mean_what_they_mean_there() -> None:
    ids = torch.tensor([[0, 0, 1], [2, 2, 2]])
    batch = TensorDict({"x": torch.arange(6).reshape(2, 3), ("mine", "traj_ids"): ids}, batch_size=[2, 3])
    padded = split_trajectories(batch, prefix="mine")
    assert padded["x"].tolist() == [[0, 1, 0], [2, 0, 0], [3, 4, 5]]
    nested = split_trajectories(batch, prefix="mine", as_nested=True)
    assert nested.shape == (3, -1)
    assert torch.equal(nested["x"].to_padded_tensor(0), padded["x"])


@pytest.mark.gpu
def test_the_gpu_gives_what_the_cpu_gives() -> None:
    ids = torch.randint(0, 2, (8, 50)).cumsum(-1)
    batch = TensorDict({"x": torch.randn(8, 50, 3), ("collector", "traj_ids"): ids}, batch_size=[8, 50])
    here, there = split_trajectories(batch), split_trajectories(batch.to("cuda")).cpu()
    assert torch.equal(here["x"], there["x"])
    assert torch.equal(here["collector", "mask"], there["collector", "mask"])
