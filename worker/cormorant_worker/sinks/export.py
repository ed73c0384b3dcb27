"""Exports a dataset to other formats: `cormorant dataset export`. LeRobot has a module of its own.

Minari's layout, written with h5py:

    <target>/data/metadata.json
    <target>/data/main_data.hdf5     episode_0/{observations, actions, rewards, terminations, truncations, infos} ...

There is one more observation than actions: the true final one. `infos` has per frame `policy_version` and the
policy's outputs, and per frame `traj_id` (two attempts of one worker never share one). HDF5 treats a "/" in a key as a
path: such keys are percent-encoded, in `main_data.hdf5` and in the metadata's spaces.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks.dataset import StoredDataset, existing_dataset
from cormorant_worker.sinks.export_lerobot import write_lerobot
from cormorant_worker.sinks.frames import Frames
from cormorant_worker.sinks.schema import NEXT, column_name, nested_lists
from cormorant_worker.spaces import Array, Key, Leaf, Space

ExportFormat = Literal["minari", "parquet", "lerobot", "huggingface"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    path: Path
    """The folder to open."""
    frames: int


def export(uri: str, target: Path, *, to: ExportFormat, fps: int = 30) -> Exported:
    """Write a dataset in another format into a folder that is new or empty: minari (HDF5, opened by
    `minari.MinariDataset(target / "data")`), parquet (one file per part), lerobot (v3.0, whose timestamps need `fps`)
    or huggingface (Parquet and a card, opened by `datasets.load_dataset(target)`). Holds a few batches in memory; for
    Minari and LeRobot the open trajectories of one worker, and 100 MB. Raises DatasetError.
    """
    dataset = existing_dataset(uri)
    if not dataset.frames:
        raise DatasetError(f"{uri} has no frames to export")
    try:
        if target.exists() and any(target.iterdir()):
            raise DatasetError(f"{target} is not empty; export into a new folder")
        target.mkdir(parents=True, exist_ok=True)
        if to == "minari":
            return _export_minari(dataset, target)
        if to == "lerobot":
            frames = write_lerobot(dataset, target, fps=fps)
        elif to == "huggingface":
            (target / "data").mkdir()
            frames = _write_parquet(dataset, target / "data", is_nested=True)
            job, env = dataset.description.job or "Dataset", json.dumps(dict(dataset.description.env))
            card = _CARD.format(job=job, frames=frames, env=env)
            (target / "README.md").write_text(card, encoding="utf-8")
        else:
            frames = _write_parquet(dataset, target)
        return Exported(path=target, frames=frames)
    except OSError as error:
        raise DatasetError(f"{target} cannot be written: {error.strerror or error}") from error


def push_to_hub(folder: Path, repo: str) -> str:
    """Upload a folder that `export` wrote as the dataset `repo` of the Hugging Face Hub: $HF_ENDPOINT, with $HF_TOKEN.
    Returns the URL of the commit. Raises DatasetError.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DatasetError("pushing to the Hugging Face Hub needs huggingface_hub; install cormorant[hub]") from error
    api = HfApi()
    try:
        api.create_repo(repo, repo_type="dataset", exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, repo_type="dataset").commit_url)
    except Exception as error:  # the errors of the HTTP client, which differs between versions of huggingface_hub
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DatasetError(
            f"cannot push to {repo} at {api.endpoint}: {reason}; check HF_TOKEN and the name, then run "
            f"`hf upload --repo-type dataset {repo} {folder}`: the folder is complete"
        ) from error


# A dataset card for the Hugging Face Hub: its first lines say where the Parquet files are.
_CARD = """---
configs:
- config_name: default
  data_files: data/*.parquet
tags:
- reinforcement-learning
- cormorant
---
# {job}

{frames:,} frames of `{env}`, collected with Cormorant. One row is one step: `observation`, `action`, `reward`,
`terminated`, `truncated`, and `traj_id` and `step`, which put rows in order. `next.observation` is null where the next
row of the same trajectory has it. `policy_version` acted; -1 is random.
"""


def _export_minari(dataset: StoredDataset, target: Path) -> Exported:
    """Write `<target>/data`. Episodes are numbered as they ended."""
    try:
        import h5py
        import minari
        from minari.serialization import serialize_space
    except ImportError as error:
        raise DatasetError(f"exporting to Minari needs {error.name}; install cormorant[datasets]") from error
    data = target / "data"
    data.mkdir()
    path = data / "main_data.hdf5"
    description = dataset.description
    paths = _paths(description.observation_space, "observations"), _paths(description.action_space, "actions")
    episodes = steps = cut = 0
    # A file of Python's, which reports a full disk as an OSError: HDF5's own writes crash the process.
    with path.open("w+b") as raw, h5py.File(raw, "w", libver="latest") as file:
        for frames in dataset.iter_trajectories():
            group = file.create_group(f"episode_{episodes}")
            for place, values in _episode_arrays(frames, *paths).items():
                group.create_dataset(place, data=values)
            group.attrs["id"] = episodes
            group.attrs["total_steps"] = len(frames)
            group.attrs["cormorant_part"] = frames.part
            group.attrs["cormorant_cut"] = frames.is_cut
            episodes += 1
            steps += len(frames)
            cut += frames.is_cut
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in description.job) or "dataset"
    metadata: dict[str, Any] = {
        "total_episodes": episodes,
        "total_steps": steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": serialize_space(_encoded(description.observation_space)),
        "action_space": serialize_space(_encoded(description.action_space)),
        "dataset_id": f"cormorant/{name}-v0",
        "minari_version": minari.__version__,
        "dataset_size": round(path.stat().st_size / 1e6, 1),
        "algorithm_name": "",
        "author": [],
        "author_email": [],
        "description": f"Collected with Cormorant. {cut} episodes whose end was not recorded are stored as "
        "truncated at their last step; their attribute cormorant_cut is true.",
        "cormorant_env": dict(description.env),
    }
    if description.env_spec:
        metadata["env_spec"] = description.env_spec
    (data / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    return Exported(path=data, frames=steps)


def _episode_arrays(frames: Frames, observation: list[str], action: list[str]) -> dict[str, Array]:
    """A trajectory by where Minari looks for it; `observation` and `action` are the places of their leaves."""
    truncated = frames.truncated
    if frames.is_cut:
        truncated = truncated.copy()
        truncated[-1] = True
    whole = map(np.concatenate, zip(frames.observation, frames.next_values, strict=False))
    arrays: dict[str, Array] = dict(zip(observation + action, (*whole, *frames.action), strict=True))
    arrays |= {"rewards": frames.reward, "terminations": frames.terminated, "truncations": truncated}
    arrays |= {"infos/policy_version": frames.policy_version, "infos/traj_id": frames.traj_id}
    schema = frames.schema
    own = zip(schema.outputs + schema.states + schema.tasks, frames.outputs + frames.states + frames.tasks, strict=True)
    arrays |= {_join("infos", leaf.key): values for leaf, values in own}
    for leaf, values in zip(schema.info, frames.info, strict=True):
        path = _join("infos", leaf.key[1:] if leaf.key[0] == "info" else leaf.key)
        arrays[_join("infos", leaf.key) if path in arrays else path] = values
    return arrays


def _paths(space: Space, root: str) -> list[str]:
    """Path of a leaf in Minari's files: `observations/cam/_index_0`."""
    match space:
        case gymnasium.spaces.Dict():
            return [path for name, part in space.spaces.items() for path in _paths(part, f"{root}/{_encode(name)}")]
        case gymnasium.spaces.Tuple():
            return [path for i, part in enumerate(space.spaces) for path in _paths(part, f"{root}/_index_{i}")]
    return [root]


def _join(root: str, key: Key) -> str:
    return "/".join((root, *map(_encode, key)))


def _encode(key: object) -> str:
    """A name that HDF5 takes as it is: "a%2Fb"."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def _encoded(space: Space) -> Space:
    """The space with the names that its parts have in the file."""
    match space:
        case gymnasium.spaces.Dict():
            return gymnasium.spaces.Dict({_encode(name): _encoded(part) for name, part in space.spaces.items()})
        case gymnasium.spaces.Tuple():
            return gymnasium.spaces.Tuple([_encoded(part) for part in space.spaces])
    return space


def _write_parquet(dataset: StoredDataset, target: Path, *, is_nested: bool = False) -> int:
    """Write `<target>/<part>.parquet` for each part that has frames; returns their number. `is_nested`: an array is a
    list of lists; otherwise one list in row-major order.

    One row per frame. Columns are those of the shards (`schema.py`) as plain Parquet types, a
    leaf's shape in the field's metadata; `next.<leaf>` is null where the following row of the same `traj_id` has it.
    """
    schema = dataset.description.schema
    arrow = _parquet_schema(dataset, is_nested=is_nested)
    written = 0
    for part in dataset.parts():
        if not part.frames:
            continue
        draft = target / f"{part.name}.parquet.open"
        with pq.ParquetWriter(draft, arrow, compression="zstd", compression_level=1) as writer:
            for frames in dataset.iter_frames(part):
                columns = [_column(leaf, values, is_nested=is_nested) for leaf, values in schema.arrays_of(frames)]
                columns += [pa.array(getattr(frames, name)) for name, _ in schema.plain]
                has_next = np.isin(np.arange(len(frames)), frames.next_rows)
                places = pa.array(np.cumsum(has_next) - 1, mask=~has_next)
                following = zip(schema.carried, frames.next_values, strict=True)
                columns += [_column(leaf, values, is_nested=is_nested).take(places) for leaf, values in following]
                writer.write_table(pa.Table.from_arrays(columns, schema=arrow))
                written += len(frames)
        draft.rename(target / f"{part.name}.parquet")
    return written


def _parquet_schema(dataset: StoredDataset, *, is_nested: bool) -> Any:
    schema = dataset.description.schema

    def field(name: str, leaf: Leaf, *, nullable: bool) -> Any:
        kind = pa.from_numpy_dtype(leaf.dtype)
        for _ in leaf.shape if is_nested else leaf.shape[:1]:
            kind = pa.list_(pa.field("element", kind, nullable=False))
        shape = {"cormorant.shape": str(list(leaf.shape)), "cormorant.dtype": leaf.dtype.name}
        return pa.field(name, kind, nullable=nullable, metadata=shape)

    fields = [field(column_name(leaf), leaf, nullable=False) for _, leaves in schema.kinds for leaf in leaves]
    fields += [pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in schema.plain]
    fields += [field(NEXT + column_name(leaf), leaf, nullable=True) for leaf in schema.carried]
    return pa.schema(fields, metadata={"cormorant.dataset": dataset.description.to_bytes()})


def _column(leaf: Leaf, values: Array, *, is_nested: bool) -> Any:
    """[n, ...] values as a column of n rows."""
    if values.size > np.iinfo(np.int32).max:
        name = column_name(leaf)
        raise DatasetError(f"a batch holds {values.size} numbers of {name}, more than a Parquet list takes")
    return nested_lists(values if is_nested or leaf.shape == () else values.reshape(len(values), -1))
