import errno
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from cormorant_worker.errors import DatasetCorrupt, DatasetError
from cormorant_worker.sinks import reader as readers
from cormorant_worker.sinks.reader import read_dataset
from cormorant_worker.sinks.stores import LocalStore

polars = pytest.importorskip("polars")

CASES = [
    {"observation": "box", "action": "discrete"},
    {"observation": "image", "action": "box"},
    {"observation": "nested", "action": "nested", "recurrent": True, "info": True},
]


@pytest.fixture(params=CASES, ids=str)
def case(request, make_dice, stored):
    """The dice that made a dataset, and the dataset as users read it."""
    dice = make_dice(**request.param)
    return dice, read_dataset(stored(dice, parts=("cpu-0-0", "cpu-0-1")).uri)


@pytest.fixture
def dataset(make_dice, stored):
    return read_dataset(stored(make_dice(), shards=5).uri)


def places(frames):
    """What tells frames apart: no trajectory has two frames of the same observation."""
    leaves = [leaf.reshape(len(leaf), -1).double() for leaf in frames.select("observation").values(True, True)]
    return [tuple(row) for row in torch.cat(leaves, 1).tolist()]


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_frames_give_each_frame_once(case, batch_size, shuffle):
    dice, dataset = case
    batches = list(dataset.frames(batch_size=batch_size, shuffle=shuffle))
    assert batch_size is None or {len(frames) for frames in batches[:-1]} == {batch_size}
    read = torch.cat(batches)
    assert len(read) == dice.frames
    assert sorted(places(read)) == sorted(places(torch.cat(list(dataset.frames()))))
    for traj_id in () if shuffle else dice.made:
        dice.assert_trajectory(read[read["collector", "traj_ids"] == traj_id])


def test_a_seed_gives_an_order_within_little_memory(dataset, monkeypatch):
    monkeypatch.setattr(readers, "_MIXED_BYTES", 1)
    kept = places(torch.cat(list(dataset.frames())))
    orders = [places(torch.cat(list(dataset.frames(shuffle=True, batch_size=10, seed=seed)))) for seed in (-1, -1, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(kept)
    assert kept not in orders
    monkeypatch.setattr(readers, "_MIXED_BYTES", 80)
    assert max(map(len, dataset.frames(columns=[("next", "reward")], shuffle=True))) <= 10, "no leaf, and not free"


def test_columns_choose_all_below_them(case):
    _, dataset = case
    read = next(dataset.frames(columns=["observation", ("next", "observation")]))
    whole = next(dataset.frames())
    assert {key if isinstance(key, tuple) else (key,) for key in whole.keys(True, True)} == set(dataset.keys)
    assert set(read.keys()) == {"observation", "next"}
    assert (read == whole.select("observation", ("next", "observation"))).all()


def test_readers_hold_no_descriptors(make_dice, stored):
    """A job of one day has thousands of shards."""
    uri = stored(make_dice(), shards=5).uri
    dataset = read_dataset(uri)
    held = [dataset.to_arrow(), *dataset.frames()]
    folder = Path(uri.removeprefix("file://")).resolve()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # others are closed meanwhile, as the garbage of earlier tests goes
            assert folder not in descriptor.readlink().parents
    assert len(held) > 5


def test_a_full_process_is_no_corrupt_dataset(dataset, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(LocalStore, "open", refuse)
    with pytest.raises(DatasetError, match=r"000000.arrow cannot be mapped into memory: .*; hold fewer") as caught:
        next(dataset.frames())
    assert not isinstance(caught.value, DatasetCorrupt)


def test_a_column_that_does_not_exist_is_a_sentence(dataset):
    with pytest.raises(DatasetError, match=r"no column 'reward'; it has observation, action, .*\('next', 'reward'\)"):
        dataset.frames(columns=["reward"])
    with pytest.raises(DatasetError, match="no column 'obs'; it has observation, action"):
        dataset.to_arrow(["obs"])
    with pytest.raises(DatasetError, match="batch_size is 0; use 1 or more"):
        dataset.frames(batch_size=0)


def test_writing_into_frames_never_writes_into_the_dataset(dataset):
    before = places(torch.cat(list(dataset.frames())))
    for frames in dataset.frames():
        frames["observation"].zero_()
    assert places(torch.cat(list(dataset.frames()))) == before


@pytest.mark.parametrize("columns", [None, ["observation", "action", ("next", "reward")]])
def test_frames_of_a_local_dataset_are_not_copied(dataset, columns):
    for frames in dataset.frames(columns=columns):
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".arrow")]
        ranges = [[int(end, 16) for end in line[0].split("-")] for line in maps]
        for key in ("observation", "action", ("next", "reward")):
            at = frames[key].data_ptr()
            assert any(start <= at < stop for start, stop in ranges)


def test_frames_that_come_later_are_not_part_of_it(make_dice, stored):
    dice = make_dice()
    whole = stored(dice)
    dataset = read_dataset(whole.uri)
    with whole.writer("cpu-2-0", dice.layout) as writer:
        dice.go_on(writer)
        writer.append(dice.fill())
    assert len(read_dataset(whole.uri)) == len(dataset) + 12
    assert sum(map(len, dataset.frames())) == len(dataset) == sum(dataset.episodes["length"].to_pylist())


def test_a_trajectory_with_a_hole_is_two(make_dice, stored):
    """Frames between two attempts were lost: what comes after them is not joined to what was before."""
    dice = make_dice(end_odds=0.0)
    whole = stored(dice, parts=("cpu-0-0",), shards=1)
    with whole.writer("cpu-0-1", dice.layout) as writer:
        writer.go_on(np.array(dice.ids), np.array([6, 4, 4]))
        writer.append(dice.fill())
    rows = read_dataset(whole.uri).episodes.select(["traj_id", "first_step", "length"]).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [(0, 0, 4), (0, 6, 4), (1, 0, 8), (2, 0, 8)]


def test_an_empty_dataset_has_no_frames(make_dice, stored):
    dataset = read_dataset(stored(make_dice(), parts=()).uri)
    assert len(dataset) == dataset.episodes.num_rows == dataset.to_arrow().num_rows == 0
    assert list(dataset.frames(batch_size=3, shuffle=True)) == list(dataset.trajectories()) == []
    assert dataset.info.policy_versions is None


def test_episodes_and_trajectories_are_what_was_made(case):
    dice, dataset = case
    table = dataset.episodes
    assert sum(table["length"].to_pylist()) == dice.frames
    for row, read in zip(table.to_pylist(), dataset.trajectories(), strict=True):
        dice.assert_trajectory(read)
        made = dice.trajectory(row["traj_id"])
        after, versions = made["next"], made["collector", "policy_version"]
        assert row["traj_id"] == read["collector", "traj_ids"][0]
        assert (row["length"], row["first_step"]) == (len(made), 0)
        assert row["return"] == sum(after["reward"].flatten().tolist())
        assert (row["terminated"], row["truncated"]) == (after["terminated"][-1], after["truncated"][-1])
        assert (row["min_policy_version"], row["max_policy_version"]) == (versions.min(), versions.max())
        if dice.layout.info:
            assert (row["info.lives"], row["info.won"]) == (after["info", "lives"][-1], after["info", "won"][-1])
            assert "info.traj_id" not in row
    assert sum(map(any, zip(*table.select(["terminated", "truncated"]), strict=True))) == dataset.info.episodes


def test_polars_reads_the_table_of_frames(case):
    dice, dataset = case
    table, leaf = polars.from_arrow(dataset.to_arrow()), dice.layout.observation[0]
    assert table.height == dice.frames
    for traj_id in dice.made:
        rows, made = table.filter(polars.col("traj_id") == traj_id), dice.trajectory(traj_id)
        assert rows["reward"].to_list() == made["next", "reward"].flatten().tolist()
        assert rows[".".join(leaf.key)].to_list() == made[leaf.key].flatten(1).tolist()


def test_info_says_what_the_dataset_is_of(make_dice, stored):
    dice = make_dice()
    info = read_dataset(stored(dice).uri).info
    assert (info.frames, info.parts, info.policy_versions) == (72, ("cpu-0-0", "cpu-1-0"), (1, 6))
    assert info.observation_space == dice.observation_space
    assert info.env == {"gymnasium": {"id": "Dice-v0"}}
    assert info.env_spec is None


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_every_frame(dataset, world_size, drop_last, shuffle):
    def share(rank, epoch):
        frames = dataset.to_torch(rank=rank, world_size=world_size, drop_last=drop_last, shuffle=shuffle, batch_size=4)
        frames.set_epoch(epoch)
        return [places(batch) for batch in frames]

    epochs = [[share(rank, epoch) for rank in range(world_size)] for epoch in range(2)]
    for ranks in epochs:
        found = [frame for batches in ranks for batch in batches for frame in batch]
        assert len(set(found)) == len(found)
        if drop_last:
            assert len({len(batches) for batches in ranks}) == 1
            assert {len(batch) for batches in ranks for batch in batches} == {4}
        else:
            assert sorted(found) == sorted(places(torch.cat(list(dataset.frames()))))
    assert (epochs[0] != epochs[1]) == shuffle


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 2, "world_size": 2}, "there is no rank 2 among 2"),
        ({"rank": 1}, "rank is 1 and world_size is None; give both or neither"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"drop_last": True}, "batch_size is None; set batch_size"),
    ],
)
def test_a_share_that_does_not_exist_is_a_sentence(dataset, arguments, words):
    with pytest.raises(DatasetError, match=words):
        dataset.to_torch(**arguments)


def test_the_environment_tells_the_rank(dataset, monkeypatch):
    assert list(dataset.to_torch(rank=13, world_size=1000)) == []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert sum(map(len, dataset.to_torch())) == 40
    monkeypatch.delenv("RANK")
    with pytest.raises(KeyError, match="RANK"):
        dataset.to_torch()  # every process would be the first one
