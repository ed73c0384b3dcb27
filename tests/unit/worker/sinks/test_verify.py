import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cormorant_testing.datasets import iter_frames
from cormorant_worker.errors import DatasetCorrupt
from cormorant_worker.sinks.verify import verify


def test_a_good_dataset_has_no_problems(make_dice, stored):
    dice = make_dice(end_odds=0.0)  # trajectories go on in the second part
    report = verify(stored(dice).uri)
    assert report.is_good
    assert (report.parts, report.shards, report.frames, report.notes) == (2, 6, 72, ())


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


def test_a_missing_shard_is_found(make_dice, stored, tmp_path):
    dataset = stored(make_dice())
    (tmp_path / "dataset" / "cpu-0-0" / "frames-000001.arrow").unlink()
    assert verify(dataset.uri).problems == ("cpu-0-0/frames-000001.arrow: is missing; restore it from a copy",)
    with pytest.raises(DatasetCorrupt, match=r"frames-000001\.arrow is missing"):
        list(iter_frames(dataset))


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_shard_cut_short_is_found(make_dice, stored, tmp_path, keep):
    dataset = stored(make_dice())
    shard = tmp_path / "dataset" / "cpu-0-0" / "frames-000002.arrow"
    shard.write_bytes(shard.read_bytes()[:keep])
    (problem,) = verify(dataset.uri).problems
    assert "the manifest says" in problem or "cannot be read" in problem


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


def test_a_trajectory_that_does_not_go_on_is_found(make_dice, stored, tmp_path):
    dice = make_dice(end_odds=0.0)
    dataset = stored(dice, parts=("cpu-0-0",))
    part = tmp_path / "dataset" / "cpu-0-0"
    first, _, last = (part / "manifest.jsonl").read_text().splitlines()
    (part / "frames-000001.arrow").unlink()
    (part / "frames-000002.arrow").rename(part / "frames-000001.arrow")
    last = _with(last, shard="frames-000001.arrow", first_frame=12, last_frame=23)
    (part / "manifest.jsonl").write_text(f"{first}\n{last}\n")
    problems = verify(dataset.uri).problems
    assert "batch 0: environment 0: step 8 of trajectory 0 follows step 3 of 0" in problems[0]


def test_rows_of_the_same_step_of_a_trajectory_are_found(make_dice, stored, tmp_path):
    stored(make_dice(end_odds=0.0, seed=1), parts=("cpu-0-0",))
    dataset = stored(make_dice(end_odds=0.0, seed=2), parts=("cpu-0-1",), shards=2)
    (problem,) = verify(dataset.uri).problems
    assert problem == (
        "24 rows of 3 trajectories appear twice: step 0 of trajectory 0, for example, is in cpu-0-0 and in cpu-0-1; "
        "keep one copy, or collect again"
    )


def test_rows_that_come_again_in_one_part_are_found(make_dice, stored):
    dice = make_dice(end_odds=0.0)
    dataset = stored(dice, parts=())
    with dataset.writer("cpu-0-0", dice.layout) as writer:
        writer.append(dice.fill())
        writer.append(dice.fill())
        writer.go_on(np.array([0, 1, 2]), np.array([6, 6, 6]))  # an environment that went back two steps
        writer.append(dice.fill())
    problems = verify(dataset.uri).problems
    assert "step 6 of trajectory 0 follows step 7 of 0" in problems[0]
    assert "6 rows of 3 trajectories appear twice: step 6 of trajectory 0" in problems[-1]


def _with(line, **changes):
    return json.dumps({**json.loads(line), **changes})
