import pytest

from cormorant_worker.errors import DatasetError, DatasetMismatch
from cormorant_worker.sinks.dataset import open_dataset
from cormorant_worker.sinks.shards import ShardLimits, ShardWriter
from cormorant_worker.sinks.stores import LocalStore
from cormorant_worker.sinks.verify import verify


def test_frames_are_durable_once_their_shard_is_sealed(make_dice, tmp_path):
    dice = make_dice()
    writer = open_dataset(str(tmp_path), dice.description()).writer("cpu-0-0", dice.layout)
    writer.append(dice.fill())
    assert writer.durable_frames == 0
    assert [p.name for p in (tmp_path / "cpu-0-0").iterdir()] == ["frames-000000.arrow.open"]
    writer.flush()
    assert writer.durable_frames == 12
    assert {p.name for p in (tmp_path / "cpu-0-0").iterdir()} == {"frames-000000.arrow", "manifest.jsonl"}
    writer.close()
    writer.close()


def test_a_shard_is_sealed_when_it_is_big_enough(make_dice, tmp_path):
    dice = make_dice()
    dataset = open_dataset(str(tmp_path), dice.description())
    writer = dataset.writer("cpu-0-0", dice.layout, limits=ShardLimits(size_bytes=2 * 12 * 54))
    for _ in range(5):
        writer.append(dice.fill())
    writer.close()
    assert [record.batches for record in dataset.parts()[0].records] == [2, 2, 1]


def test_a_shard_is_sealed_when_it_is_old_enough(make_dice, tmp_path):
    dice, now = make_dice(), [0.0]
    dataset = open_dataset(str(tmp_path), dice.description())
    limits = ShardLimits(seconds=10)
    writer = ShardWriter(LocalStore(tmp_path), "cpu-0-0", dice.layout, limits=limits, clock=lambda: now[0])
    for now[0] in (0.0, 9.0, 10.0, 12.0, 23.0):
        writer.append(dice.fill())
    writer.close()
    assert [record.batches for record in dataset.parts()[0].records] == [3, 2]


def test_a_manifest_line_tells_what_is_in_a_shard(make_dice, stored):
    dice = make_dice(end_odds=1.0)
    records = stored(dice, parts=("cpu-0-0",)).parts()[0].records
    assert [(r.first_frame, r.last_frame, r.frames, r.ends) for r in records] == [
        (0, 11, 12, 12),
        (12, 23, 12, 12),
        (24, 35, 12, 12),
    ]
    assert [(r.min_policy_version, r.max_policy_version) for r in records] == [(1, 1), (2, 2), (3, 3)]


def test_a_writer_needs_a_parts_name_and_the_datasets_layout(make_dice, stored):
    dataset = stored(make_dice(), parts=())
    for name in ("cpu-0", "../x", "cpu-a-b"):
        with pytest.raises(DatasetError, match="does not name a part"):
            dataset.writer(name, make_dice().layout)
    with pytest.raises(DatasetMismatch, match=r"action action: int64 \[\] is stored, now it is float32 \[3\]"):
        dataset.writer("cpu-0-0", make_dice(action="box").layout)


def test_what_a_crash_leaves_behind_is_not_read(make_dice, stored, tmp_path):
    dice = make_dice()
    dataset = stored(dice, parts=("cpu-0-0",))
    part = tmp_path / "dataset" / "cpu-0-0"
    (part / "frames-000003.arrow.open").write_bytes(b"ARROW1 cut off")
    (part / "frames-000004.arrow").write_bytes(b"renamed, but without a line")
    with (part / "manifest.jsonl").open("a") as manifest:
        manifest.write('{"shard": "frames-000004.arr')

    found = dataset.parts()[0]
    assert found.is_torn
    assert dataset.leftovers(found) == ("frames-000003.arrow.open", "frames-000004.arrow")
    assert dataset.frames == 36
    dice.assert_stored(dataset.iter_trajectories())
    report = verify(dataset.uri)
    assert report.is_good
    assert len(report.notes) == 3


def test_a_folder_that_vanishes_is_told_in_a_sentence(make_dice, stored, tmp_path):
    dice = make_dice()
    writer = stored(dice).writer("cpu-0-1", dice.layout)
    writer.append(dice.fill())
    writer.flush()
    (tmp_path / "dataset" / "cpu-0-1").rename(tmp_path / "gone")
    with pytest.raises(DatasetError, match=r"cannot be written: No such file.*12 frames in sealed shards are kept"):
        writer.append(dice.fill())
    with pytest.raises(DatasetError, match="cannot be written"):
        writer.append(dice.fill())
    writer.close()
    assert writer.durable_frames == 12
