"""Writes the frames of one worker attempt into immutable shards. Used inside the worker process, by one thread.

    append -> open shard -> (64 MiB, 10 s, flush or close) -> SEALING -> DURABLE
                             └ kill -9 loses this one ┘

Sealing (digest, fsync, rename, manifest line) runs in a thread while the collector collects its next batch. The next
`append` waits for it before it writes anything: so a crash loses at most one shard, the open one or the one being
sealed.
"""

import errno
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.errors import DatasetError, PartExists
from cormorant_worker.normalize import Document, Statistics
from cormorant_worker.sinks.frames import FrameEncoder
from cormorant_worker.sinks.schema import FrameSchema
from cormorant_worker.sinks.stores import DatasetStore, ShardFile
from cormorant_worker.spaces import Array

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Open:
    """The open shard and the fields of its future manifest line."""

    name: str
    file: ShardFile
    writer: Any
    first_frame: int
    opened_at: float
    frames: int = 0
    batches: int = 0
    ends: int = 0
    min_version: int = np.iinfo(np.int64).max
    max_version: int = np.iinfo(np.int64).min
    statistics: Statistics | None = None


class ShardWriter:
    """The sink of one worker attempt. Made by `Dataset.writer`."""

    def __init__(
        self,
        store: DatasetStore,
        part: str,
        layout: Layout,
        *,
        shard_bytes: int,
        seal_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the folder of a new part, for blocks of a layout, whose T may differ. A shard is sealed with the first
        batch that brings it to `shard_bytes` before compression, or to the age of `seal_after_s`. Raises DatasetError.
        """
        self.part = part
        self.durable_frames = 0
        """Frames that survive a crash of this process; it only grows."""
        self._store, self._clock = store, clock
        self._shard_bytes, self._seal_after_s = shard_bytes, seal_after_s
        self._schema = FrameSchema.of(layout)
        self._fingerprint = self._schema.fingerprint()
        self._frame_bytes = self._schema.frame_bytes()
        self._arrow = self._schema.arrow({"cormorant.part": part, "cormorant.num_envs": str(layout.num_envs)})
        self._encoder = FrameEncoder(self._schema, layout.num_envs, self._arrow)
        self._options = pa.ipc.IpcWriteOptions(
            compression="lz4" if self._schema.is_compressed else None, use_threads=False
        )
        self._open: _Open | None = None
        self._sealing: Future[None] | None = None
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._shards = 0
        self._frames = 0
        self._failure: str | None = None
        try:
            store.create_part(part)
        except FileExistsError as error:
            raise PartExists(
                f"{store.uri}/{part} was already written; each part belongs to one attempt: "
                "write as an attempt that has no folder yet"
            ) from error
        except OSError as error:
            raise DatasetError(f"{store.uri}/{part} cannot be created: {error.strerror or error}") from error

    def append(self, block: Block, moments: Statistics | None = None) -> None:
        """Store a sealed block, whose memory may be reused afterwards, and its statistics. Costs about a file write of
        the frames; images are compressed (lz4). Raises DatasetError where this or an earlier block could not be stored;
        sealed shards are kept.
        """
        self._wait_for_seal()
        frames = block.num_frames
        if not frames:
            return
        batch = self._encoder.encode(block)
        with self._explained(frames * self._frame_bytes):
            if (shard := self._open) is None:
                name = f"frames-{self._shards:06d}.arrow"
                file = self._store.create_shard(self.part, name)
                writer = pa.ipc.new_file(pa.PythonFile(file, mode="w"), self._arrow, options=self._options)
                shard = self._open = _Open(name, file, writer, self._frames, self._clock())
                self._shards += 1
            shard.writer.write_batch(batch)
        shard.frames += frames
        if moments is not None:
            shard.statistics = moments if shard.statistics is None else shard.statistics.merged(moments)
        shard.batches += 1
        self._frames += frames
        # Not `to_numpy`, which imports pandas, as `pa.array` does.
        versions = np.frombuffer(batch.column("policy_version").buffers()[1], np.int64)
        shard.min_version = min(shard.min_version, int(versions.min()))
        shard.max_version = max(shard.max_version, int(versions.max()))
        done = block.terminated[: block.num_rows] | block.truncated[: block.num_rows]
        if (mask_TB := block.mask) is not None:
            done &= mask_TB
        shard.ends += int(np.count_nonzero(done))
        if (
            shard.frames * self._frame_bytes >= self._shard_bytes
            or self._clock() - shard.opened_at >= self._seal_after_s
        ):
            self._begin_seal()

    def go_on(self, ids: Array, lengths: Array) -> None:
        """The next block continues the trajectories `ids` [B], of which `lengths` [B] frames were stored before."""
        self._encoder.open_steps.go_on(ids, lengths)

    def flush(self) -> None:
        """Seal the open shard and wait until it is durable."""
        self._wait_for_seal()
        self._begin_seal()
        self._wait_for_seal()

    def close(self) -> None:
        """Seal the open shard; after a failure, only clean up. May be called twice. Raises DatasetError."""
        try:
            if self._failure is None:
                self.flush()
        finally:
            self._sealer.shutdown()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_seal(self) -> None:
        if self._open is not None:
            self._sealing = self._sealer.submit(self._seal, self._open, self._shards - 1)
            self._open = None

    def _seal(self, shard: _Open, number: int) -> None:
        try:
            shard.writer.close()
            size_bytes, sha256 = shard.file.size_bytes, shard.file.publish()
            record = ShardRecord(
                shard=shard.name,
                frames=shard.frames,
                first_frame=shard.first_frame,
                last_frame=shard.first_frame + shard.frames - 1,
                batches=shard.batches,
                ends=shard.ends,
                min_policy_version=shard.min_version,
                max_policy_version=shard.max_version,
                size_bytes=size_bytes,
                sha256=sha256,
                schema=self._fingerprint,
                sealed_at=datetime.now(UTC).isoformat(timespec="seconds"),
                statistics=None if shard.statistics is None else shard.statistics.document(),
            )
            self._store.note(self.part, number, json.dumps(record.model_dump(exclude_none=True, by_alias=True)))
        finally:
            shard.file.discard()
        self.durable_frames += shard.frames

    def _wait_for_seal(self) -> None:
        if self._failure is not None:
            raise DatasetError(self._failure)
        if self._sealing is not None:
            sealing, self._sealing = self._sealing, None
            with self._explained(self._shard_bytes):
                sealing.result()

    @contextmanager
    def _explained(self, wanted_bytes: int) -> Iterator[None]:
        """Turn what the file system says into a sentence, and take no more blocks."""
        try:
            yield
        except OSError as error:
            lost = self._frames - self.durable_frames
            if self._open is not None:
                self._open.file.discard()
                self._open = None
            what = error.strerror or str(error)
            if error.errno in _FULL:
                what = f"{what} (about {wanted_bytes} bytes are needed)"
            self._failure = (
                f"{self._store.uri}/{self.part} cannot be written: {what}; {self.durable_frames} frames in sealed "
                f"shards are kept, {lost} frames of the open shard are lost; free disk space or repair the folder, "
                "then restart with the same URI"
            )
            raise DatasetError(self._failure) from error


class ShardRecord(BaseModel, frozen=True, extra="forbid", strict=True):
    """A line of a part's manifest."""

    shard: str
    """File name within the part."""
    frames: int
    first_frame: int
    """Number of the shard's first frame within the part, from 0."""
    last_frame: int
    """Number of its last frame, inclusive."""
    batches: int
    """Record batches, one for each batch that the collector handed over."""
    ends: int
    """Frames that ended a trajectory, terminated or truncated."""
    min_policy_version: int
    max_policy_version: int
    size_bytes: int
    sha256: str
    """Digest of the file, 64 hex digits."""
    fingerprint: str = Field(alias="schema")
    """Fingerprint of the schema: `FrameSchema.fingerprint`."""
    sealed_at: str
    """UTC, ISO 8601; for people."""
    statistics: Document | None = None
    """Moments of the shard's frames; None unless the manifest normalizes."""
