"""Checks a dataset against its manifests: every digest, every count, every trajectory. Called by the command line.

Uses 32 bytes per trajectory, because rows that share a trajectory and a step may be in any two parts, and while a part
is read, 32 bytes per trajectory of each of its batches.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cormorant_worker.errors import DatasetCorrupt, DatasetError
from cormorant_worker.sinks.dataset import DatasetPart, StoredDataset, existing_dataset
from cormorant_worker.sinks.frames import Frames, decode
from cormorant_worker.sinks.shards import ShardRecord
from cormorant_worker.spaces import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    uri: str
    parts: int
    shards: int
    frames: int
    """Frames in sealed shards, as the manifests say."""
    size_bytes: int
    """Bytes of sealed shards, as the manifests say."""
    problems: tuple[str, ...]
    """Problems found, one sentence each; empty for a valid dataset."""

    @property
    def is_good(self) -> bool:
        return not self.problems


def verify(uri: str) -> Report:
    """Read a whole dataset and compare it with its manifests. Raises DatasetError where there is none, or no
    `dataset.json`.
    """
    dataset = existing_dataset(uri)
    parts: list[DatasetPart] = []
    problems: list[str] = []
    stretches: list[Array] = []
    for name in dataset.part_names():
        try:
            parts.append(dataset.part(name))
        except DatasetError as error:
            problems.append(str(error))
            continue
        checks = _PartChecks(dataset, parts[-1], len(parts) - 1)
        problems += checks.problems()
        stretches.append(_joined(checks.stretches))
    problems += _check_shared(_joined(stretches), [part.name for part in parts])
    records = [record for part in parts for record in part.records]
    return Report(
        uri=dataset.uri,
        parts=len(parts),
        shards=len(records),
        frames=sum(record.frames for record in records),
        size_bytes=sum(record.size_bytes for record in records),
        problems=tuple(problems),
    )


def _joined(stretches: Sequence[Array]) -> Array:
    """All stretches in order of trajectory and step; those of one part that follow each other are one."""
    pieces = np.concatenate([np.empty((0, 4), dtype=np.int64), *stretches])
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    goes_on = (pieces[1:, 1] == pieces[:-1, 2] + 1) & (pieces[1:, ::3] == pieces[:-1, ::3]).all(axis=1)
    begins, ends = np.r_[True, ~goes_on][: len(pieces)], np.r_[~goes_on, True][: len(pieces)]
    return np.concatenate([pieces[begins, :2], pieces[ends, 2:]], axis=1)


def _check_shared(stretches: Array, parts: list[str]) -> Iterator[str]:
    """Rows that are the same step of the same trajectory. `stretches`: as `_joined` returns them."""
    traj, first, last, part = stretches.T
    # The furthest step so far of the same trajectory: stretches may lie within longer ones. Ids and steps need 96
    # bits together, so that trajectories are numbered first.
    number = np.cumsum(np.r_[0, traj[1:] != traj[:-1]]) if len(traj) else traj
    reached = np.maximum.accumulate(number << 32 | last) & 0xFFFFFFFF
    again = np.flatnonzero((traj[1:] == traj[:-1]) & (first[1:] <= reached[:-1])) + 1
    if not len(again):
        return
    rows = int((np.minimum(last[again], reached[again - 1]) - first[again] + 1).sum())
    at = int(again[0])
    yield (
        f"{rows} rows of {len(np.unique(traj[again]))} trajectories appear twice: step {first[at]} of trajectory "
        f"{traj[at]}, for example, is in {parts[part[at - 1]]} and in {parts[part[at]]}; "
        "keep one copy, or collect again"
    )


class _PartChecks:
    """The checks of one part, shard by shard, which follow the trajectory of each environment."""

    def __init__(self, dataset: StoredDataset, part: DatasetPart, number: int) -> None:
        self._dataset, self._part, self._number = dataset, part, number
        self._last = np.empty((0, 4), dtype=np.int64)
        """[environments, 4]: environment, trajectory, step, and whether it ended, of each one's last row."""
        self.stretches: list[Array] = []
        """[n, 4] int64 of each batch: trajectory, first and last of consecutive steps, and the part's number."""

    def problems(self) -> Iterator[str]:
        next_frame = 0
        for number, record in enumerate(self._part.records):
            where = f"{self._part.name}/{record.shard}"
            if record.shard != f"frames-{number:06d}.arrow":
                yield f"{where}: is on line {number + 1} of the manifest, where shard {number} should be"
            if record.first_frame != next_frame or record.last_frame - record.first_frame + 1 != record.frames:
                yield (
                    f"{where}: has frames {record.first_frame} to {record.last_frame}, {record.frames} in the "
                    f"manifest; it should start at {next_frame}"
                )
            next_frame = record.last_frame + 1
            try:
                self._check_bytes(record, where)
                yield from (f"{where}: {problem}" for problem in self._check_frames(record, where))
            except DatasetCorrupt as error:
                yield str(error)
                self._last = self._last[:0]  # whatever comes next is taken as it is

    def _check_bytes(self, record: ShardRecord, where: str) -> None:
        try:
            with self._dataset.store.open(self._part.name, record.shard) as file:
                size, digest = file.size(), hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise DatasetCorrupt(f"{where}: is missing; restore it from a copy") from error
        except (OSError, ValueError) as error:
            raise DatasetCorrupt(f"{where}: cannot be read: {error}") from error
        for what, found, noted in (
            ("a size of", size, record.size_bytes),
            ("the digest", digest, record.sha256),
        ):
            if found != noted:
                raise DatasetCorrupt(f"{where}: has {what} {found}, the manifest says {noted}; restore it from a copy")

    def _check_frames(self, record: ShardRecord, where: str) -> Iterator[str]:
        schema = self._dataset.description.schema
        frames = ends = batches = 0
        versions: list[int] = []
        with self._dataset.reading(self._part, record) as reader:
            if not reader.schema.equals(schema.arrow({})):
                raise DatasetCorrupt(f"{where}: has other columns than dataset.json says")
            for number in range(reader.num_record_batches):
                batch: Any = reader.get_batch(number)
                batch.validate(full=True)
                decoded = decode(schema, self._part.name, batch)
                yield from (f"batch {number}: {problem}" for problem in self._check_steps(decoded))
                frames += len(decoded)
                ends += int(np.count_nonzero(decoded.terminated | decoded.truncated))
                versions += [int(decoded.policy_version.min()), int(decoded.policy_version.max())]
                batches += 1
        for name, counted, noted in (
            ("frames", frames, record.frames),
            ("batches", batches, record.batches),
            ("ends of trajectories", ends, record.ends),
            ("lowest policy version", min(versions), record.min_policy_version),
            ("highest policy version", max(versions), record.max_policy_version),
            ("schema", schema.fingerprint(), record.fingerprint),
        ):
            if counted != noted:
                yield f"{name}: {counted} in the shard, {noted} in the manifest"

    def _check_steps(self, frames: Frames) -> Iterator[str]:
        """Sentences about what does not follow from what was before."""
        order = np.lexsort((frames.step, frames.traj_id))
        traj_id, step = frames.traj_id[order], frames.step[order]
        begins = np.flatnonzero(np.r_[True, (traj_id[1:] != traj_id[:-1]) | (step[1:] != step[:-1] + 1)])
        ends = np.r_[begins[1:], len(order)] - 1
        part = np.full(len(begins), self._number)
        self.stretches.append(np.stack([traj_id[begins], step[begins], step[ends], part], axis=1, dtype=np.int64))

        before = len(self._last)
        ended = frames.terminated | frames.truncated
        rows = np.stack([frames.env, frames.traj_id, frames.step, ended], axis=1, dtype=np.int64)
        # The last row of each environment before this batch goes first.
        rows = np.concatenate([self._last, rows])
        order = np.argsort(rows[:, 0], kind="stable")
        (env, traj_id, step, done), is_before = rows[order].T, order < before
        same_env = env[1:] == env[:-1]
        goes_on = same_env & (traj_id[1:] == traj_id[:-1])
        broken = goes_on & ((step[1:] != step[:-1] + 1) | (done[:-1] > 0))
        # Between batches a crash may end a trajectory.
        broken |= same_env & ~goes_on & ((step[1:] != 0) | ~(is_before | (done > 0))[:-1])
        for at in np.flatnonzero(broken)[:1]:
            yield (
                f"environment {env[at]}: step {step[at + 1]} of trajectory {traj_id[at + 1]} follows step {step[at]} "
                f"of {traj_id[at]}"
            )
        last = np.r_[~same_env, True]
        self._last = rows[order[last]]
        expected = np.sort(order[(last | (done > 0)) & ~is_before]) - before
        if not np.array_equal(expected, frames.next_rows):
            yield f"the next observation is stored for {len(frames.next_rows)} frames, {len(expected)} need it"
