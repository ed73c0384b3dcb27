"""Reads the shards of a dataset, batch by batch. Called by `trajectories.py` and the exports."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cormorant_worker.errors import DatasetCorrupt
from cormorant_worker.sinks.dataset import Dataset, DatasetPart
from cormorant_worker.sinks.frames import Frames, decode
from cormorant_worker.sinks.shards import ShardRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    path: Path
    """The folder to open."""
    frames: int
    episodes: int
    """Trajectories; for Parquet those that ended."""
    cut: int
    """Trajectories whose end the dataset does not have; Minari: stored as truncated at their last frame."""


def iter_part(dataset: Dataset, part: DatasetPart) -> Iterator[Frames]:
    """A part's durable frames, batch by batch, as they were collected. Holds one batch at a time.

    Arrays look into the shard's file (or, for compressed shards, into memory that the batch owns). Digests are not
    looked at; `verify` does that.

    Raises:
        DatasetCorrupt: a shard is missing or cannot be read.
    """
    for record in part.records:
        with reading(dataset, part, record) as reader:
            for number in range(reader.num_record_batches):
                yield decode(dataset.description.schema, part.name, reader.get_batch(number))


@contextmanager
def reading(dataset: Dataset, part: DatasetPart, record: ShardRecord) -> Iterator[Any]:
    """Open one shard as a pyarrow.ipc.RecordBatchFileReader.

    Raises:
        DatasetCorrupt: the shard is missing, not an Arrow file, or of another schema.
    """
    where = f"{dataset.uri}/{part.name}/{record.shard}"
    try:
        reader = pa.ipc.open_file(dataset.store.open(part.name, record.shard))
        stored = (reader.schema.metadata or {}).get(b"cormorant.schema", b"").decode()
        if stored != dataset.description.schema.fingerprint():
            raise DatasetCorrupt(
                f"{where} has the schema {stored or 'of another program'}, the dataset's is "
                f"{dataset.description.schema.fingerprint()}; it does not belong here"
            )
        yield reader
    except FileNotFoundError as error:
        raise DatasetCorrupt(f"{where} is missing; restore it from a copy") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetCorrupt(f"{where} cannot be read: {error}; restore it from a copy") from error
