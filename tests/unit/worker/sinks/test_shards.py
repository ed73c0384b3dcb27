"""Shards as they are written, read back and verified."""

import hashlib
import json
import uuid

import gymnasium
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cormorant_testing.datasets import iter_frames
from cormorant_worker.errors import DatasetCorrupt, DatasetError, DatasetMismatch
from cormorant_worker.sinks.dataset import open_dataset
from cormorant_worker.sinks.shards import ShardWriter
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


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({"shard_bytes": 2 * 12 * 54, "seal_after_s": 99}, [2, 2, 1]),
        ({"shard_bytes": 1 << 20, "seal_after_s": 10}, [3, 2]),
    ],
)
def test_a_shard_is_sealed_when_it_is_big_or_old_enough(make_dice, tmp_path, limits, batches):
    dice, now = make_dice(), [0.0]
    dataset = open_dataset(str(tmp_path), dice.description())
    writer = ShardWriter(LocalStore(tmp_path), "cpu-0-0", dice.layout, **limits, clock=lambda: now[0])
    for now[0] in (0.0, 9.0, 10.0, 12.0, 23.0):
        writer.append(dice.fill())
    writer.close()
    assert [record.batches for record in dataset.parts()[0].records] == batches


def test_a_writer_needs_the_datasets_layout(make_dice, stored):
    dataset = stored(make_dice(), parts=())
    with pytest.raises(DatasetMismatch, match=r"action leaves: .* int64 \[\] is stored, now it is .* float32 \[3\]"):
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
    assert len(found.records) == 3
    assert dataset.frames == 36
    dice.assert_stored(dataset.iter_trajectories())
    assert verify(dataset.uri).is_good


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


@st.composite
def voyages(draw):
    num_envs, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    lengths = st.lists(st.integers(0, num_rows), min_size=num_envs, max_size=num_envs)
    return {
        "observation": draw(st.sampled_from(["box", "image", "nested", "discrete"])),
        "action": draw(st.sampled_from(["discrete", "box", "nested"])),
        "num_envs": num_envs,
        "num_rows": num_rows,
        "recurrent": draw(st.booleans()),
        "info": draw(st.booleans()),
        "end_odds": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        "batches": draw(st.lists(st.one_of(st.none(), lengths), min_size=1, max_size=5)),
        "shard_bytes": draw(st.sampled_from([1, 500, 1 << 20])),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(voyage=voyages())
def test_every_value_of_every_trajectory_comes_back(make_dice, voyage):
    batches, shard_bytes = voyage.pop("batches"), voyage.pop("shard_bytes")
    dice = make_dice(**voyage)
    uri = f"memory://{uuid.uuid4().hex}"
    dataset = open_dataset(uri, dice.description())
    with dataset.writer("cpu-0-0", dice.layout, shard_bytes=shard_bytes) as writer:
        for lengths in batches:
            writer.append(dice.fill(lengths))

    assert dataset.frames == writer.durable_frames == dice.frames
    dice.assert_stored(dataset.iter_trajectories())
    assert verify(uri).problems == ()


def test_images_are_compressed_and_numbers_are_not(make_dice, stored, tmp_path):
    still = gymnasium.spaces.Box(0, 255, (4, 32, 32), np.uint8)
    dice = make_dice(still, num_rows=20)
    dice._observe = lambda: (np.zeros((4, 32, 32), np.uint8),)
    record = stored(dice, parts=("cpu-0-0",), shards=1).parts()[0].records[0]
    assert record.size_bytes < record.frames * 4 * 32 * 32 / 10


def test_plain_arrow_reads_a_shard(make_dice, stored, tmp_path):
    import pyarrow as pa

    dataset = stored(make_dice("nested"), parts=("cpu-0-0",), shards=1)
    table = pa.ipc.open_file(tmp_path / "dataset" / "cpu-0-0" / "frames-000000.arrow").read_all()
    assert table.num_rows == dataset.frames
    assert table["observation.cam.0"].combine_chunks().to_numpy_ndarray().shape == (12, 2, 4, 5)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit_is_found(make_dice, stored, tmp_path, place, bit):
    shard = tmp_path / "dataset" / "cpu-1-0" / "frames-000001.arrow"
    if not shard.exists():
        stored(make_dice())
    whole = shard.read_bytes()
    data = bytearray(whole)
    data[int(place * len(data))] ^= 1 << bit
    shard.write_bytes(data)
    problems = verify(str(tmp_path / "dataset")).problems
    shard.write_bytes(whole)
    assert len(problems) == 1
    assert "cpu-1-0/frames-000001.arrow: has the digest" in problems[0]


@pytest.mark.parametrize("keep", [None, 0, 100, -1])
def test_a_shard_that_is_missing_or_cut_short_is_found(make_dice, stored, tmp_path, keep):
    dataset = stored(make_dice())
    shard = tmp_path / "dataset" / "cpu-0-0" / "frames-000001.arrow"
    data = shard.read_bytes()
    shard.unlink()
    if keep is not None:
        shard.write_bytes(data[:keep])
    words = "is missing" if keep is None else f"has a size of {len(data[:keep])}, the manifest says {len(data)}"
    assert verify(dataset.uri).problems == (f"cpu-0-0/frames-000001.arrow: {words}; restore it from a copy",)
    with pytest.raises(DatasetCorrupt, match=r"frames-000001\.arrow (is missing|cannot be read)"):
        list(iter_frames(dataset))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [*lines, lines[-1]], "is on line 4"),
        (lambda lines: [lines[1], lines[0], lines[2]], "should start at 0"),
        (lambda lines: [lines[0], "{}", lines[2]], "line 2 of the manifest is not a manifest line"),
        (lambda lines: [_with(lines[0], frames="12"), *lines[1:]], "frames: Input should be a valid integer, found"),
        (lambda lines: [_with(lines[0], ends=99), *lines[1:]], "ends of trajectories: "),
        (lambda lines: [_with(lines[0], batches=9), *lines[1:]], "batches: 1 in the shard, 9 in the manifest"),
        (lambda lines: [_with(lines[0], frames=11, last_frame=10), *lines[1:]], "should start at 11"),
    ],
)
def test_a_manifest_that_lies_is_found(make_dice, stored, tmp_path, change, words):
    dataset = stored(make_dice())
    manifest = tmp_path / "dataset" / "cpu-0-0" / "manifest.jsonl"
    lines = change(manifest.read_text().splitlines())
    manifest.write_text("".join(f"{line}\n" for line in lines))
    assert any(words in problem for problem in verify(dataset.uri).problems)


def test_a_shard_of_another_dataset_is_one_problem(make_dice, stored, tmp_path):
    dataset = stored(make_dice(end_odds=0.0), parts=("cpu-0-0",))
    stored(make_dice(action="box"), uri=tmp_path / "other", parts=("cpu-0-0",))
    data = (tmp_path / "other" / "cpu-0-0" / "frames-000001.arrow").read_bytes()
    part = tmp_path / "dataset" / "cpu-0-0"
    (part / "frames-000001.arrow").write_bytes(data)
    first, second, last = (part / "manifest.jsonl").read_text().splitlines()
    second = _with(second, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (part / "manifest.jsonl").write_text(f"{first}\n{second}\n{last}\n")
    (problem,) = verify(dataset.uri).problems
    assert "frames-000001.arrow has the schema" in problem


def test_rows_of_the_same_step_of_a_trajectory_are_found(make_dice, stored, tmp_path):
    stored(make_dice(end_odds=0.0, seed=1), parts=("cpu-0-0",))
    dataset = stored(make_dice(end_odds=0.0, seed=2), parts=("cpu-0-1",), shards=2)
    (problem,) = verify(dataset.uri).problems
    assert problem == (
        "24 rows of 3 trajectories appear twice: step 0 of trajectory 0, for example, is in cpu-0-0 and in cpu-0-1; "
        "keep one copy, or collect again"
    )


def test_memory_for_a_part_grows_with_its_trajectories(make_dice, stored, monkeypatch):
    dataset, compared = stored(make_dice(end_odds=0.0), parts=("cpu-0-0",)), []
    monkeypatch.setattr(
        "cormorant_worker.sinks.verify._check_shared", lambda stretches, _: compared.append(stretches) or []
    )
    verify(dataset.uri)
    assert compared[0].tolist() == [[trajectory, 0, 11, 0] for trajectory in range(3)]


def test_steps_that_do_not_go_on_are_found(make_dice, stored):
    dice = make_dice(end_odds=0.0)
    dataset = stored(dice, parts=())
    with dataset.writer("cpu-0-0", dice.layout) as writer:
        for step in (0, 4, 6, 14):  # environments go back two steps, and later leave out four
            writer.go_on(np.arange(3), np.full(3, step))
            writer.append(dice.fill())
    again, left_out, twice = verify(dataset.uri).problems
    assert "step 6 of trajectory 0 follows step 7 of 0" in again
    assert "step 14 of trajectory 0 follows step 9 of 0" in left_out
    assert "6 rows of 3 trajectories appear twice: step 6 of trajectory 0" in twice


def _with(line, **changes):
    return json.dumps({**json.loads(line), **changes})
