import errno
import re

import gymnasium
import numpy as np
import pytest

from cormorant_contract.spaces import space_to_json
from cormorant_testing.scripts import no_room
from cormorant_worker.errors import DatasetCorrupt, DatasetError, DatasetMismatch, PartExists
from cormorant_worker.fleet.dataset_root import DatasetRoot
from cormorant_worker.sinks.dataset import find_dataset, open_dataset
from cormorant_worker.sinks.stores import ObjectStore
from cormorant_worker.sinks.verify import verify

SPACES = [
    gymnasium.spaces.Box(np.array([-1.5, 0]), np.array([np.inf, 1e30]), dtype=np.float64),
    gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8),
    gymnasium.spaces.Box(-3, 9, (), np.int64),
    gymnasium.spaces.Discrete(5, start=-2),
    gymnasium.spaces.MultiDiscrete([[2, 3], [4, 5]]),
    gymnasium.spaces.MultiBinary([2, 2]),
    gymnasium.spaces.Dict(
        {"b": gymnasium.spaces.Discrete(2), "a": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3)])}
    ),
]


def test_an_object_store_has_every_line_of_a_long_manifest(make_dice, stored, memory_uri):
    dice = make_dice(num_rows=1)
    dataset = stored(dice, uri=memory_uri, parts=("cpu-0-0", "cpu-1-0"), shards=130)  # 64 lines an object
    dataset.begin_run(0, b'{"job": "ours"}')
    for _ in range(2):  # the first one ends the parts
        assert DatasetRoot(memory_uri, job="ours").frames == dice.frames
    assert verify(memory_uri).is_good


def test_refused_put_of_an_existing_object_is_not_repeated(memory_uri, monkeypatch):
    # s3fs makes this of an answer that names no condition, and FileExistsError of one that does.
    store, asked = ObjectStore(memory_uri, patience_s=2), []
    store.write_root("a", b"first", is_first=True)

    def refuse(self, path, value, mode="overwrite", **kwargs):
        asked.append(path)
        raise OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold")

    monkeypatch.setattr(type(store._fs), "pipe_file", refuse)
    store.write_root("a", b"second", is_first=True)
    assert (store.read_root("a"), len(asked)) == (b"first", 1)


def test_refused_credentials_and_a_missing_bucket_have_remedies(memory_uri, monkeypatch):
    def refuse(self, path, **kwargs):
        raise PermissionError(errno.EACCES, "Forbidden")

    monkeypatch.setattr(type(ObjectStore(memory_uri)._fs), "cat_file", refuse)
    with pytest.raises(DatasetError, match="cannot be read: Forbidden; check the credentials"):
        find_dataset(memory_uri)
    with pytest.raises(DatasetError, match="s3:// names no bucket or folder; add it, for example s3://bucket/dataset"):
        find_dataset("s3://")
    with pytest.raises(DatasetError, match="nonsense://bucket/x cannot be opened"):
        find_dataset("nonsense://bucket/x")


@pytest.mark.parametrize("is_local", [True, False])
def test_a_job_ends_its_own_parts_and_no_other_jobs(make_dice, stored, memory_uri, tmp_path, is_local):
    """Writers of its earlier heads may live on nodes that are cut off, and go on."""
    dice, uri = make_dice(), str(tmp_path / "local") if is_local else memory_uri
    dataset = stored(dice, uri=uri, parts=("big-cpu-0-0", "big-cpu-0-1", "cpu-1-0"), shards=1)
    dataset.begin_run(0, b'{"job": "ours"}')
    line = dataset.store.lines("big-cpu-0-1")[0]
    for job, ended in (("theirs", []), ("ours", ["big-cpu-0-1", "cpu-1-0"])):
        DatasetRoot(uri, job=job).close()
        found = [name for name in dataset.part_names() if dataset.store.read_root(f"{name}/ended.json")]
        assert found == ended, "the last of each slot: of others the fleet has seen the end"
    assert dataset.part("cpu-1-0", has_ended=True).frames == 12, "again"
    with pytest.raises(OSError, match="a head of this job ended the part after 1 shards"):
        dataset.store.note("big-cpu-0-1", 1, line)
    assert dataset.frames == dice.frames
    assert dataset.part("cpu-7-0", has_ended=True).frames == 0
    with pytest.raises(PartExists):
        dataset.writer("cpu-7-0", dice.layout)  # it was lost before it began its part


def test_an_end_that_a_full_disk_loses_is_logged(make_dice, stored, tmp_path):
    dataset = stored(make_dice(), uri=str(tmp_path), parts=("cpu-0-0",), shards=1)
    with no_room() as logged:
        assert dataset.part("cpu-0-0", has_ended=True).frames == dataset.frames
    (event,) = logged
    assert (event["event"], event["folder"]) == ("part_not_ended", f"{tmp_path}/cpu-0-0")


def test_two_jobs_at_one_uri_have_separate_parts(make_dice, memory_uri):
    dice = make_dice()
    ours, theirs = (open_dataset(memory_uri, dice.description()) for _ in range(2))
    with ours.writer("cpu-0-0", dice.layout) as writer:
        with pytest.raises(PartExists, match=r"cpu-0-0 was already written.*an attempt that has no folder yet"):
            theirs.writer("cpu-0-0", dice.layout)  # nothing is sealed yet
        writer.append(dice.fill())
    assert verify(memory_uri).is_good


def test_each_run_has_an_epoch_of_its_own(make_dice, memory_uri, tmp_path):
    for uri in (memory_uri, str(tmp_path)):
        dataset = open_dataset(uri, make_dice().description())
        assert dataset.runs() == ()
        dataset.begin_run(3, b"one")
        dataset.begin_run(12, b"two")
        assert dataset.runs() == (3, 12)
        with pytest.raises(DatasetError, match=r"another run started writing to .* at the same moment \(two\)"):
            dataset.begin_run(12, b"three")


def test_the_description_is_kept(make_dice, tmp_path):
    made = make_dice(gymnasium.spaces.Tuple(SPACES), recurrent=True).description(seed=7, job="pong")
    assert open_dataset(str(tmp_path), made).description == made
    assert len((tmp_path / "dataset.json").read_text()) < 9000, "equal bounds are told once"
    assert find_dataset(str(tmp_path / "nowhere")) is None
    with pytest.raises(ValueError, match="no fixed shape"):
        space_to_json(gymnasium.spaces.Text(5))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"env": {"gymnasium": {"id": "Cards-v0"}}},
            'env.gymnasium: {"id": "Dice-v0"} is stored, now it is {"id": "Cards-v0"}',
        ),
        ({"env": {"envpool": {}}}, 'env.gymnasium: {"id": "Dice-v0"} is stored, now it is nothing'),
        ({"observation": "image"}, 'observation space: {"type": "Box", "shape": [3], "dtype": "float32", "low": -1.0'),
        ({"observation": "image"}, "observation leaves: ['observation'] float32 [3] is stored, now it is ['obs"),
        ({"action": "box"}, 'action space: {"type": "Discrete", "n": 4, "start": 0, "dtype": "int64"} is stored, now'),
        ({"recurrent": True}, "state leaves: nothing is stored, now it is ['hidden'] float32 [2, 3]"),
    ],
)
def test_another_job_is_refused_with_what_differs(make_dice, tmp_path, other, words):
    open_dataset(str(tmp_path), make_dice().description())
    open_dataset(f"file://{tmp_path}", make_dice().description(seed=99, job="another"))
    env = {"env": other["env"]} if "env" in other else {}
    dice = make_dice() if env else make_dice(**other)
    with pytest.raises(DatasetMismatch, match=re.escape(words)):
        open_dataset(str(tmp_path), dice.description(**env))


def test_a_file_is_no_dataset(make_dice, tmp_path):
    (tmp_path / "file").write_text("hello")
    for uri in ("file", "file/below"):
        with pytest.raises(DatasetError, match="is not a folder"):
            open_dataset(str(tmp_path / uri), make_dice().description())


def test_a_description_that_is_none_or_of_a_later_format_is_refused(tmp_path):
    words = dict.fromkeys(("{", "[]", "{}", '{"formatVersion": 1}'), r"dataset\.json does not describe a dataset")
    for text, said in (words | {'{"formatVersion": 2}': "format version 2, this version reads 1"}).items():
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(DatasetCorrupt, match=said):
            find_dataset(str(tmp_path))


def test_two_columns_of_one_name_are_refused(make_dice, tmp_path):
    space = gymnasium.spaces.Dict(
        {"a.b": gymnasium.spaces.Discrete(2), "a": gymnasium.spaces.Dict({"b": gymnasium.spaces.Discrete(2)})}
    )
    dice = make_dice(space)
    with pytest.raises(DatasetError, match=r"two columns of the dataset would be called 'observation\.a\.b'"):
        open_dataset(str(tmp_path), dice.description()).writer("cpu-0-0", dice.layout)
