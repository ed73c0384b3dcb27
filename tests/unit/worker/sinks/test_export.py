import json
import os
import subprocess
from dataclasses import replace

import gymnasium
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec

from cormorant_testing.collecting import make_job
from cormorant_testing.datasets import iter_frames
from cormorant_testing.envs import CountingEnv
from cormorant_testing.scripts import no_room
from cormorant_testing.snippets import ROOT
from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks import export_lerobot
from cormorant_worker.sinks.dataset import open_dataset
from cormorant_worker.sinks.description import describe_job
from cormorant_worker.sinks.export import export
from cormorant_worker.sinks.reader import read_dataset
from cormorant_worker.spaces import flatten

minari = pytest.importorskip("minari")

BOX, FOUR = gymnasium.spaces.Box(-1, 1, (3,), np.float32), gymnasium.spaces.Discrete(4)

CASES = [
    {"observation": "box", "action": "discrete"},
    {"observation": "image", "action": "box"},
    {"observation": "nested", "action": "nested"},
    {"observation": "box", "action": "discrete", "recurrent": True, "info": True},
]
ONE_NUMBER = {"observation": "box", "action": gymnasium.spaces.Box(-1, 1, (1,), np.float32)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_minari_itself_reads_every_value(make_dice, stored, tmp_path, case):
    dice = make_dice(**case, end_odds=0.1)
    dataset = stored(dice, parts=("cpu-0-0",), shards=4)
    left = by_id(dataset)
    done = export(dataset.uri, tmp_path / "out", to="minari")
    read = minari.MinariDataset(str(done.path))
    assert read.observation_space == dice.observation_space
    assert read.action_space == dice.action_space
    assert (read.total_episodes, read.total_steps) == (len(left), dice.frames)
    assert done.frames == dice.frames
    assert any(frames.is_cut for frames in left.values())
    for episode in read.iterate_episodes():
        wanted = left.pop(int(episode.infos["traj_id"][0]))
        whole = map(np.concatenate, zip(wanted.observation, wanted.next_values, strict=False))
        assert_tree(dice.observation_space, episode.observations, whole)
        assert_tree(dice.action_space, episode.actions, wanted.action)
        truncated = wanted.truncated.copy()
        truncated[-1] |= wanted.is_cut
        infos = episode.infos
        pairs = [
            (episode.rewards, wanted.reward),
            (episode.terminations, wanted.terminated),
            (episode.truncations, truncated),
            (infos["policy_version"], wanted.policy_version),
            (infos["action_log_prob"], wanted.outputs[0]),
        ]
        if wanted.info:
            assert infos["won"].dtype == np.bool_
            stored_as = (infos["lives"], infos["info"]["traj_id"], infos["won"], infos["red"]["reward"])
            pairs += [(infos["hidden"], wanted.states[0]), *zip(stored_as, wanted.info, strict=True)]
        for ours, made in pairs:
            np.testing.assert_array_equal(ours, made)
    assert not left


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        ({"id": "CartPole-v1", "kwargs": {"sutton_barto_reward": True}}, CartPoleEnv),
        ({"entrypoint": "cormorant_testing.envs:CountingEnv", "kwargs": {"lengths": [5]}}, CountingEnv),
    ],
)
def test_minari_builds_the_environment_again(make_dice, tmp_path, env, kind):
    clip = {"entrypoint": "gymnasium.wrappers:ClipReward", "kwargs": {"min_reward": -0.5, "max_reward": 0.5}}
    job = make_job(env={"gymnasium": {**env, "numEnvs": 2, "wrappers": [clip]}, "maxEpisodeSteps": 17})
    dice = make_dice()
    dataset = open_dataset(str(tmp_path / "data"), describe_job(job, dice.layout, BOX, FOUR))
    with dataset.writer("cpu-0-0", dice.layout) as writer:
        writer.append(dice.fill())
    export(dataset.uri, tmp_path / "out", to="minari")
    made = minari.MinariDataset(str(tmp_path / "out" / "data")).recover_environment()
    ours = gymnasium.make(read_dataset(dataset.uri).info.env_spec)
    for again in (made, ours):
        assert type(again.unwrapped) is kind
        assert isinstance(again, gymnasium.wrappers.ClipReward)
        assert again.spec.max_episode_steps == 17
        again.reset(seed=1)
        assert abs(again.step(again.action_space.sample())[1]) <= 0.5
        assert again.spec.kwargs == env.get("kwargs", {})


@pytest.mark.parametrize(
    "env",
    [
        {"envpool": {"taskId": "CartPole-v1", "numEnvs": 2}},
        {"gymnasium": {"id": "a:B-v0"}},
        {"gymnasium": {"id": "OfArrays-v0"}},
    ],
)
def test_an_environment_that_gymnasium_cannot_build_from_json_has_no_spec(make_dice, env, monkeypatch):
    of_arrays = EnvSpec("OfArrays-v0", "cormorant_testing.envs:CountingEnv", kwargs={"lengths": np.array([5])})
    monkeypatch.setitem(gymnasium.registry, of_arrays.id, of_arrays)
    dice = make_dice()
    assert describe_job(make_job(env=env), dice.layout, BOX, FOUR).env_spec == ""


@pytest.mark.parametrize(
    "parts", [{"a": BOX, "a/b": FOUR, "a%2Fb": FOUR, "0": FOUR, "10": BOX}, {0: BOX, 10: FOUR, 2: FOUR}]
)
def test_minari_reads_keys_that_hdf5_would_take_for_paths_and_integers(make_dice, stored, tmp_path, parts):
    dice = make_dice(observation=gymnasium.spaces.Dict(parts))
    uri = stored(dice, parts=("cpu-0-0",)).uri
    open_dataset(uri, dice.description())  # as a job does that goes on
    export(uri, tmp_path / "out", to="minari")
    episode = next(minari.MinariDataset(str(tmp_path / "out" / "data")).iterate_episodes())
    made = dice.trajectory(int(episode.infos["traj_id"][0]))
    stored_as = {name: {"a/b": "a%2Fb", "a%2Fb": "a%252Fb"}.get(name, str(name)) for name in dice.observation_space}
    assert set(episode.observations) == set(stored_as.values())
    for leaf, name in zip(dice.layout.observation, stored_as.values(), strict=True):
        wanted = np.concatenate([made[leaf.key], made["next", *leaf.key][-1:]])
        np.testing.assert_array_equal(episode.observations[name], wanted)


@pytest.mark.parametrize("to", ["parquet", "huggingface"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tables_have_every_value(make_dice, stored, tmp_path, case, to):
    dice = make_dice(**case)
    dataset = stored(dice, parts=("cpu-0-0",))
    done = export(dataset.uri, tmp_path / "out", to=to)
    if to == "parquet":
        read = pq.read_table(done.path).to_pydict()
    else:
        datasets = pytest.importorskip("datasets")
        read = datasets.load_dataset(str(done.path), split="train", cache_dir=str(tmp_path / "cache")).to_dict()
    listed = flat if to == "parquet" else np.ndarray.tolist
    found = list(iter_frames(dataset))
    assert len(read["reward"]) == dice.frames == done.frames
    for name, values in columns_of(dice, found).items():
        assert read[name] == listed(values)
    for place, leaf in enumerate(dice.layout.observation):
        following = []
        for frames in found:
            stored_as = dict(zip(frames.next_rows.tolist(), listed(frames.next_values[place]), strict=True))
            following += map(stored_as.get, range(len(frames)))
        assert read["next." + ".".join(leaf.key)] == following


@pytest.mark.parametrize("file_bytes", [1 << 20, 1], ids=["one file", "many files"])
@pytest.mark.parametrize("case", [*CASES, ONE_NUMBER], ids=str)
def test_lerobot_files_have_every_value(make_dice, stored, tmp_path, monkeypatch, case, file_bytes):
    """By the published layout of v3.0; `test_lerobot_itself_reads_every_value` asks LeRobot."""
    monkeypatch.setattr(export_lerobot, "_FILE_BYTES", file_bytes)
    monkeypatch.setattr(export_lerobot, "_FILES_PER_CHUNK", 2)
    dice = make_dice(**case)
    dataset = stored(dice, parts=("cpu-0-0",))
    done = export(dataset.uri, tmp_path / "out", to="lerobot", fps=20)
    info = json.loads((done.path / "meta" / "info.json").read_text())
    episodes = pq.read_table(done.path / "meta" / "episodes").to_pylist()
    trajectories = list(dataset.iter_trajectories())
    assert (info["total_frames"], info["total_episodes"]) == (done.frames, len(episodes)) == (36, len(trajectories))
    for episode, frames in zip(episodes, trajectories, strict=True):
        place = {name: episode[f"data/{name}"] for name in ("chunk_index", "file_index")}
        table = pq.read_table(done.path / info["data_path"].format(**place))
        assert set(table.column_names) == set(info["features"])
        rows = table.filter(pc.field("episode_index") == episode["episode_index"])
        assert rows["index"].to_pylist() == list(range(episode["dataset_from_index"], episode["dataset_to_index"]))
        assert rows["timestamp"].to_pylist() == pytest.approx([n / 20 for n in range(len(frames))])
        assert rows["next.done"].to_pylist() == (frames.terminated | frames.truncated).tolist()
        for name, values in lerobot_columns(dice, frames).items():
            # LeRobot reads the shape [1] as a value, and refuses lists of one.
            assert rows[name].to_pylist() == (values[:, 0] if values.shape[1:] == (1,) else values).tolist()
            assert info["features"][name]["shape"] == list(values.shape[1:] or (1,))
    every = np.concatenate([frames.reward for frames in trajectories]).astype(np.float64)
    told = json.loads((done.path / "meta" / "stats.json").read_text())["next.reward"]
    assert [told[name][0] for name in ("min", "max", "mean", "std")] == pytest.approx(
        [every.min(), every.max(), every.mean(), every.std()]
    )
    assert told["count"] == [len(every)]


LEROBOT = ROOT / ".venv-lerobot" / "bin" / "python"
READ_BY_LEROBOT = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
dataset = LeRobotDataset("local/out", root=sys.argv[1])
items = [dataset[number] for number in range(len(dataset))]
assert {item["task"] for item in items} == {"Dice-v0"}
np.savez(sys.argv[2], **{key: np.stack([np.asarray(item[key]) for item in items]) for key in dataset.features})
window = LeRobotDataset("local/out", root=sys.argv[1], delta_timestamps={"next.reward": [0, 1 / dataset.fps]})
assert window[0]["next.reward"].shape[0] == 2
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not LEROBOT.exists(), reason="LeRobot is not installed; `make test-lerobot` runs this test")
@pytest.mark.parametrize("case", [*CASES, ONE_NUMBER], ids=str)
def test_lerobot_itself_reads_every_value(make_dice, stored, tmp_path, case):
    dice = make_dice(**case)
    dataset = stored(dice, parts=("cpu-0-0",))
    done = export(dataset.uri, tmp_path / "out", to="lerobot")
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    ran = subprocess.run(
        [LEROBOT, "-c", READ_BY_LEROBOT, done.path, tmp_path / "read.npz"], env=offline, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    read = np.load(tmp_path / "read.npz")
    for name, wanted in lerobot_columns(dice, *dataset.iter_trajectories()).items():
        np.testing.assert_array_equal(read[name].reshape(wanted.shape), wanted)


def test_lerobot_loses_no_output_to_a_feature_of_its_own(make_dice, stored, tmp_path):
    dice = make_dice()
    dice.layout = replace(dice.layout, outputs=(replace(dice.layout.outputs[0], key=("index",)),))
    with pytest.raises(DatasetError, match="the policy's output index has the name of a feature of LeRobot's own"):
        export(stored(dice, shards=1).uri, tmp_path / "out", to="lerobot")


@pytest.mark.parametrize("to", ["minari", "parquet", "lerobot", "huggingface"])
def test_an_export_says_that_the_disk_is_full(make_dice, stored, tmp_path, to):
    uri = stored(make_dice("image")).uri
    with no_room(2000), pytest.raises(DatasetError, match=r"out cannot be written: .*File too large"):
        export(uri, tmp_path / "out", to=to)


def test_an_export_overwrites_nothing_and_needs_frames(make_dice, stored, tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(DatasetError, match="is not empty; export into a new folder"):
        export(stored(make_dice()).uri, tmp_path, to="parquet")
    with pytest.raises(DatasetError, match="empty has no frames to export"):
        export(stored(make_dice(), uri=tmp_path / "empty", shards=0).uri, tmp_path / "out", to="huggingface")
    assert not (tmp_path / "out").exists()


def by_id(dataset):
    return {int(frames.traj_id[0]): frames for frames in dataset.iter_trajectories()}


def columns_of(dice, found):
    """Values of all these frames by the name of their column."""
    values = {}
    for kind in ("observation", "action", "states"):
        for place, leaf in enumerate(getattr(dice.layout, kind)):
            values[".".join(leaf.key)] = [getattr(frames, kind)[place] for frames in found]
    for name in ("reward", "terminated", "truncated", "traj_id", "step", "policy_version"):
        values[name] = [getattr(frames, name) for frames in found]
    return {name: np.concatenate(parts) for name, parts in values.items()}


def lerobot_columns(dice, *found):
    """The same by LeRobot's names."""
    observation = "observation.image" if len(dice.layout.observation[0].shape) > 1 else "observation.state"
    names = {"observation": observation, "step": "frame_index"}
    names |= {name: f"next.{name}" for name in ("reward", "terminated", "truncated")}
    return {names.get(name, name): values for name, values in columns_of(dice, found).items()}


def flat(values):
    return values.tolist() if values.ndim == 1 else values.reshape(len(values), -1).tolist()


def assert_tree(space, value, leaves):
    for read, wanted in zip(flatten(space, value), leaves, strict=True):
        assert read.dtype == wanted.dtype
        np.testing.assert_array_equal(read, wanted)
