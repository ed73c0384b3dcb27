import json

import gymnasium
import numpy as np
import pyarrow.parquet as pq
import pytest

from cormorant_testing.datasets import iter_frames
from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks import export as exports
from cormorant_worker.sinks.dataset import open_dataset
from cormorant_worker.sinks.export import export
from cormorant_worker.sinks.trajectories import iter_stretches
from cormorant_worker.spaces import flatten

minari = pytest.importorskip("minari")

CASES = [
    {"observation": "box", "action": "discrete"},
    {"observation": "image", "action": "box"},
    {"observation": "nested", "action": "nested"},
    {"observation": "box", "action": "discrete", "recurrent": True, "info": True},
]


def make(make_dice, spaces, case, **more):
    named = {name: spaces.get(value, value) if isinstance(value, str) else value for name, value in case.items()}
    return make_dice(**named, **more)


@pytest.mark.parametrize("held_bytes", [1 << 28, 0], ids=["whole", "grown"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_minari_itself_reads_every_value(make_dice, spaces, stored, tmp_path, monkeypatch, case, held_bytes):
    monkeypatch.setattr(exports, "_HELD_BYTES", held_bytes)
    dice = make(make_dice, spaces, case, end_odds=0.1)
    dataset = stored(dice, parts=("cpu-0-0",), shards=4)
    whole = {trajectory.traj_id: trajectory for trajectory in iter_stretches(dataset)}

    done = export(dataset.uri, tmp_path / "out", to="minari")

    read = minari.MinariDataset(str(done.path))
    assert read.observation_space == dice.observation_space
    assert read.action_space == dice.action_space
    assert (read.total_episodes, read.total_steps) == (len(whole), dice.frames) == (done.episodes, done.frames)
    assert done.cut == sum(trajectory.ending == "cut" for trajectory in whole.values()) > 0
    for episode in read.iterate_episodes():
        wanted = whole.pop(int(episode.infos["traj_id"][0]))
        assert_tree(dice.observation_space, episode.observations, wanted.observation)
        assert_tree(dice.action_space, episode.actions, wanted.action)
        np.testing.assert_array_equal(episode.rewards, wanted.reward)
        np.testing.assert_array_equal(episode.terminations, wanted.terminated)
        truncated = wanted.truncated.copy()
        truncated[-1] |= wanted.ending == "cut"
        np.testing.assert_array_equal(episode.truncations, truncated)
        np.testing.assert_array_equal(episode.infos["policy_version"], wanted.policy_version)
        np.testing.assert_array_equal(episode.infos["action_log_prob"], wanted.outputs[0])
        if wanted.states:
            np.testing.assert_array_equal(episode.infos["hidden"], wanted.states[0][:-1])
        if wanted.info:
            assert episode.infos["won"].dtype == np.bool_
            stored_as = (episode.infos["lives"], episode.infos["info"]["traj_id"], episode.infos["won"])
            for ours, made in zip(stored_as, wanted.info, strict=True):
                np.testing.assert_array_equal(ours, made)
    assert not whole


def test_minari_reads_keys_that_hdf5_would_take_for_paths(make_dice, spaces, stored, tmp_path):
    box, discrete = spaces["box"], spaces["discrete"]
    parts = {"a": box, "a/b": discrete, "a%2Fb": discrete, ".": box, "0": discrete, "10": box}
    dice = make_dice(observation=gymnasium.spaces.Dict(parts))
    export(stored(dice, parts=("cpu-0-0",)).uri, tmp_path / "out", to="minari")
    episode = next(minari.MinariDataset(str(tmp_path / "out" / "data")).iterate_episodes())
    assert set(episode.observations) == {"a", "a%2Fb", "a%252Fb", "%2E", "0", "10"}
    wanted = np.array(dice.made[int(episode.infos["traj_id"][0])].observation, dtype=object)
    names = list(dice.observation_space.spaces)
    for leaf, name in enumerate(names):
        stored_as = {"a/b": "a%2Fb", "a%2Fb": "a%252Fb", ".": "%2E"}.get(name, name)
        np.testing.assert_array_equal(episode.observations[stored_as], np.stack([step[leaf] for step in wanted]))


def test_a_dataset_of_integer_keys_goes_on(make_dice, spaces, stored, tmp_path):
    space = gymnasium.spaces.Dict({0: spaces["box"], 10: spaces["discrete"], 2: spaces["discrete"]})
    dataset = stored(make_dice(observation=space), parts=("cpu-0-0",))
    open_dataset(dataset.uri, make_dice(observation=space).description())
    export(dataset.uri, tmp_path / "out", to="minari")
    read = minari.MinariDataset(str(tmp_path / "out" / "data"))
    assert set(read.observation_space.spaces) == {"0", "2", "10"}


def test_minari_finds_the_dataset_by_its_name(make_dice, stored, tmp_path, monkeypatch):
    dice = make_dice()
    dataset = stored(dice)
    done = export(dataset.uri, tmp_path / "root" / "cormorant" / "dataset-v0", to="minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    assert minari.load_dataset("cormorant/dataset-v0").total_steps == dice.frames
    assert json.loads((done.path / "metadata.json").read_text())["jpeg_encoding"] is False


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parquet_has_every_value(make_dice, spaces, stored, tmp_path, case):
    dice = make(make_dice, spaces, case)
    dataset = stored(dice, parts=("cpu-0-0",))
    done = export(dataset.uri, tmp_path / "out", to="parquet")
    table = pq.read_table(done.path)
    assert table.num_rows == dice.frames == done.frames
    start = 0
    for frames in iter_frames(dataset):
        rows = table.slice(start, len(frames))
        start += len(frames)
        for name, values in (("reward", frames.reward), ("traj_id", frames.traj_id), ("terminated", frames.terminated)):
            assert rows[name].to_pylist() == values.tolist()
        kinds = ((dice.layout.observation, frames.observation), (dice.layout.action, frames.action))
        for leaves, arrays in (*kinds, (dice.layout.states, frames.states)):
            for leaf, values in zip(leaves, arrays, strict=True):
                assert rows[".".join(leaf.key)].to_pylist() == flat(values)
        for leaf, values in zip(dice.layout.observation, frames.next_observation, strict=True):
            following = rows["next." + ".".join(leaf.key)].to_pylist()
            assert [row for row, value in enumerate(following) if value is not None] == frames.next_rows.tolist()
            assert [value for value in following if value is not None] == flat(values)


def test_row_groups_are_bounded(make_dice, spaces, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "_MOST_ROWS", 5)
    dataset = stored(make_dice())
    export(dataset.uri, tmp_path / "out", to="parquet")
    found = pq.ParquetFile(tmp_path / "out" / "cpu-0-0.parquet").metadata
    assert max(found.row_group(n).num_rows for n in range(found.num_row_groups)) == 5


def test_an_export_overwrites_nothing(make_dice, stored, tmp_path):
    dataset = stored(make_dice())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(DatasetError, match="out is not empty"):
        export(dataset.uri, tmp_path / "out", to="parquet")


def flat(values):
    return values.tolist() if values.ndim == 1 else values.reshape(len(values), -1).tolist()


def assert_tree(space, value, leaves):
    for read, wanted in zip(flatten(space, value), leaves, strict=True):
        assert read.dtype == wanted.dtype
        np.testing.assert_array_equal(read, wanted)
