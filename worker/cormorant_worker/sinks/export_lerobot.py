"""LeRobot's dataset format v3.0: https://huggingface.co/docs/lerobot/lerobot-dataset-v3.

    <target>/data/chunk-000/file-000.parquet            frames, whole episodes, up to 100 MB per file
    <target>/meta/episodes/chunk-000/file-000.parquet   where each episode lies
    <target>/meta/info.json, stats.json, tasks.parquet  features, their statistics, the names of tasks
    <target>/meta/cormorant.json                        the dataset's own description

Every number is stored as it was collected; images are arrays, not videos. The format has no observation after an
episode's last action.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cormorant_worker.errors import DatasetError
from cormorant_worker.normalize import RunningMoments
from cormorant_worker.sinks.dataset import StoredDataset
from cormorant_worker.sinks.frames import Frames
from cormorant_worker.sinks.schema import FrameSchema, column_name, nested_lists
from cormorant_worker.spaces import Array, Leaf

_FILE_BYTES = 100 << 20
_FILES_PER_CHUNK = 1000
_STATISTICS_BYTES = 4 << 20
_WHERE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_PLAIN = {
    "next.reward": "float32",
    "next.done": "bool",
    "next.terminated": "bool",
    "next.truncated": "bool",
    "policy_version": "int64",
    "traj_id": "int64",
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


class LeRobotWriter:
    """Writes one dataset: `add` each trajectory whole, then `close`."""

    def __init__(self, dataset: StoredDataset, target: Path, *, fps: int) -> None:
        """Begin in an empty folder. Raises DatasetError where a leaf does not fit the format."""
        self._target, self._fps = target, fps
        self._schema = dataset.description.schema
        self._tasks = [str(variant["name"]) for variant in dataset.description.env.get("variants", ())]
        if not self._tasks:
            blocks = [block for block in dataset.description.env.values() if isinstance(block, Mapping)]
            names = (block.get(name) for block in blocks for name in ("taskId", "id", "entrypoint"))
            self._tasks = [next((str(name) for name in names if name), "task")]
        self._features = {name: (leaf.dtype.name, leaf.shape or (1,)) for name, leaf in _columns(self._schema).items()}
        if twice := self._features.keys() & _PLAIN.keys():
            raise DatasetError(
                f"the policy's output {twice.pop()} has the name of a feature of LeRobot's own; rename it, or export "
                "to parquet or huggingface"
            )
        self._features |= {name: (dtype, (1,)) for name, dtype in _PLAIN.items()}
        self._held: list[dict[str, Array]] = []
        self._held_bytes = 0
        self._files = 0
        self.frames = 0
        self._episodes: list[dict[str, Any]] = []
        shapes = {name: shape for name, (_, shape) in self._features.items()}
        self._moments = {name: RunningMoments.none(shape) for name, shape in shapes.items()}
        self._ranges = {name: (np.full(shape, np.inf), np.full(shape, -np.inf)) for name, shape in shapes.items()}

    def add(self, frames: Frames) -> None:
        count, number = len(frames), len(self._episodes)
        step = np.arange(count)
        leaves = (values for _, values in self._schema.arrays_of(frames))
        arrays = dict(zip(_columns(self._schema), leaves, strict=False)) | {
            "next.reward": frames.reward,
            "next.done": frames.terminated | frames.truncated,
            "next.terminated": frames.terminated,
            "next.truncated": frames.truncated,
            "policy_version": frames.policy_version,
            "traj_id": frames.traj_id,
            "timestamp": (step / self._fps).astype(np.float32),
            "frame_index": step,
            "episode_index": np.full(count, number),
            "index": self.frames + step,
            "task_index": frames.tasks[0] if frames.tasks else np.zeros(count, dtype=np.int64),
        }
        chunk, file = divmod(self._files, _FILES_PER_CHUNK)
        self._episodes.append(
            {
                "episode_index": number,
                "tasks": [self._tasks[task] for task in np.unique(arrays["task_index"])],
                "length": count,
                "dataset_from_index": self.frames,
                "dataset_to_index": self.frames + count,
                "data/chunk_index": chunk,
                "data/file_index": file,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )
        self.frames += count
        self._held.append(arrays)
        self._held_bytes += sum(values.nbytes for values in arrays.values())
        if self._held_bytes >= _FILE_BYTES:
            self._write_file()

    def close(self) -> None:
        """Write the remaining frames and all of `meta`."""
        self._write_file()
        features = {
            name: {"dtype": dtype, "shape": list(shape), "names": None}
            for name, (dtype, shape) in self._features.items()
        }
        info = {
            "codebase_version": "v3.0",
            "robot_type": None,
            "total_episodes": len(self._episodes),
            "total_frames": self.frames,
            "total_tasks": len(self._tasks),
            "chunks_size": _FILES_PER_CHUNK,
            "data_files_size_in_mb": _FILE_BYTES >> 20,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": f"data/{_WHERE}",
            "video_path": None,
            "features": features,
        }
        self._path("meta/info.json").write_text(json.dumps(info, indent=2))
        statistics: dict[str, dict[str, Any]] = {}
        for name, known in self._moments.items():
            low, high = self._ranges[name]
            arrays = {"min": low, "max": high, "mean": known.mean, "std": np.sqrt(known.m2 / known.count)}
            statistics[name] = {which: values.tolist() for which, values in arrays.items()} | {"count": [known.count]}
        self._path("meta/stats.json").write_text(json.dumps(statistics, indent=2))
        # Metadata by which pandas takes the tasks' names for the index.
        index = "__index_level_0__"
        kinds = (("task_index", "task_index", "int64", "int64"), (None, index, "unicode", "object"))
        described = [
            {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
            for name, field, kind, dtype in kinds
        ]
        pandas = {"index_columns": [index], "column_indexes": [], "columns": described}
        tasks = pa.table({"task_index": np.arange(len(self._tasks)), index: self._tasks})
        tasks = tasks.replace_schema_metadata({"pandas": json.dumps(pandas)})
        pq.write_table(tasks, self._path("meta/tasks.parquet"))
        episodes = self._path("meta/episodes/" + _WHERE.format(chunk_index=0, file_index=0))
        pq.write_table(pa.Table.from_pylist(self._episodes), episodes)

    def _write_file(self) -> None:
        if not self._held:
            return
        columns = {name: np.concatenate([arrays[name] for arrays in self._held]) for name in self._features}
        for name, column in columns.items():
            values = column.reshape((len(column), *self._features[name][1]))
            step = max(1, _STATISTICS_BYTES // (8 * max(1, values[0].size)))
            for part in (values[at : at + step].astype(np.float64) for at in range(0, len(values), step)):
                low, high = self._ranges[name]
                self._ranges[name] = np.minimum(low, part.min(axis=0)), np.maximum(high, part.max(axis=0))
                self._moments[name] = self._moments[name].merged(RunningMoments.of(part))
        chunk, file = divmod(self._files, _FILES_PER_CHUNK)
        path = self._path("data/" + _WHERE.format(chunk_index=chunk, file_index=file))
        # LeRobot takes the shape (1,) for a number.
        columns |= {name: values[:, 0] for name, values in columns.items() if values.shape[1:] == (1,)}
        pq.write_table(pa.table({name: nested_lists(values) for name, values in columns.items()}), path)
        self._held, self._held_bytes = [], 0
        self._files += 1

    def _path(self, name: str) -> Path:
        path = self._target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _columns(schema: FrameSchema) -> dict[str, Leaf]:
    """Leaves by LeRobot's names of features. The one of `task_id` comes last, and has another name there."""
    plain = ("observation", "image") if len(schema.observation[0].shape) > 1 else ("observation", "state")
    leaves = (leaf for kind, leaves in schema.kinds if kind != "task" for leaf in leaves)
    return {".".join(plain) if leaf.key == ("observation",) else column_name(leaf): leaf for leaf in leaves}


def write_lerobot(dataset: StoredDataset, target: Path, *, fps: int) -> int:
    """Write a dataset into an empty folder; returns the number of frames."""
    writer = LeRobotWriter(dataset, target, fps=fps)
    for frames in dataset.iter_trajectories():
        writer.add(frames)
    writer.close()
    (target / "meta" / "cormorant.json").write_bytes(dataset.description.to_bytes())
    return writer.frames
