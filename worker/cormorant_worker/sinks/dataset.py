"""A dataset: `dataset.json` at the root, and one part per worker attempt. Opened by the fleet, by workers, by readers.

<uri>/dataset.json
<uri>/run-000000.json ...    one per run that wrote here, by its epoch
<uri>/<group>-<index>-<attempt>/frames-000000.arrow ...    and manifest.jsonl, one line per sealed shard
"""

import errno
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from cormorant_worker.collect.block import Layout
from cormorant_worker.errors import DatasetCorrupt, DatasetError, DatasetMismatch
from cormorant_worker.normalize import Statistics
from cormorant_worker.sinks.description import DatasetDescription
from cormorant_worker.sinks.frames import Frames, decode, joined
from cormorant_worker.sinks.schema import NEXT, FrameSchema, column_name
from cormorant_worker.sinks.shards import ShardRecord, ShardWriter
from cormorant_worker.sinks.stores import DatasetStore, open_store

DESCRIPTION = "dataset.json"
_RUN = re.compile(r"run-(?P<number>\d{6})\.json")
_PART = re.compile(r"(?P<group>.+)-(?P<index>\d+)-(?P<attempt>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPart:
    name: str
    records: tuple[ShardRecord, ...]
    """Sealed shards, in order."""

    @property
    def frames(self) -> int:
        return sum(record.frames for record in self.records)

    @property
    def statistics(self) -> Statistics:
        """Moments of its frames; empty unless the manifest normalizes."""
        statistics = [Statistics.of_document(record.statistics) for record in self.records if record.statistics]
        return reduce(Statistics.merged, statistics, Statistics())


class StoredDataset:
    """The files of an existing dataset, for writing, checking and reading. Every call reads the files again."""

    def __init__(self, store: DatasetStore, description: DatasetDescription) -> None:
        """Use `open_dataset`, `find_dataset` or `existing_dataset`."""
        self.store, self.uri = store, store.uri
        self.description = description

    def parts(self) -> tuple[DatasetPart, ...]:
        """All parts, by group, index and attempt."""
        return tuple(map(self.part, self.part_names()))

    def part_names(self) -> tuple[str, ...]:
        with _explained(self.uri):
            names = self.store.parts()
        return tuple(sorted((name for name in names if _PART.fullmatch(name)), key=split_part_name))

    def runs(self) -> tuple[int, ...]:
        """Epochs of the runs that wrote here, in order."""
        with _explained(self.uri):
            names = self.store.files()
        return tuple(sorted(int(match["number"]) for match in map(_RUN.fullmatch, names) if match))

    def begin_run(self, epoch: int, holder: bytes) -> None:
        """Record a run, by epoch and unique name, before it writes. Raises DatasetError if another has the epoch."""
        with _explained(self.uri, done="written"):
            self.store.write_root(f"run-{epoch:06d}.json", holder, is_first=True)
        if (found := self.holder(epoch)) != holder:
            raise DatasetError(
                f"another run started writing to {self.uri} at the same moment ({found.decode(errors='replace')}); "
                "stop that run first, or use another URI"
            )

    def holder(self, epoch: int) -> bytes:
        """The holder given to `begin_run`; empty: no such run."""
        with _explained(self.uri):
            return self.store.read_root(f"run-{epoch:06d}.json") or b""

    @property
    def frames(self) -> int:
        return sum(part.frames for part in self.parts())

    def writer(
        self, part: str, layout: Layout, *, shard_bytes: int = 64 << 20, seal_after_s: float = 10.0
    ) -> ShardWriter:
        """Begin the part of one worker attempt, `<group>-<index>-<attempt>`, never written before. Raises
        DatasetMismatch where the layout's leaves differ from the dataset's, DatasetError where the part exists or
        cannot be written.
        """
        ours = replace(self.description, schema=FrameSchema.of(layout))
        _refuse(self.uri, self.description.differences(ours))
        return ShardWriter(self.store, part, layout, shard_bytes=shard_bytes, seal_after_s=seal_after_s)

    def part(self, name: str, *, has_ended: bool = False) -> DatasetPart:
        """One part by its manifest. `has_ended`: its writer has ended or is lost, and adds no more to it."""
        with _explained(f"{self.uri}/{name}"):
            lines = self.store.end_part(name) if has_ended else self.store.lines(name)
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(ShardRecord.model_validate_json(line))
            except ValidationError as error:
                wrong = error.errors()[0]
                raise DatasetCorrupt(
                    f"{self.uri}/{name}: line {number} of the manifest is not a manifest line: "
                    f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}, found {wrong['input']!r}; restore the file "
                    "from a copy"
                ) from error
        return DatasetPart(name=name, records=tuple(records))

    def iter_frames(self, part: DatasetPart, schema: FrameSchema | None = None) -> Iterator[Frames]:
        """A part's durable frames as they were collected, one batch in memory at a time: views of the shard's file, or
        of memory that the batch owns where it is compressed. Digests are not checked, as `verify` does. Columns that
        the schema, which may have fewer leaves than the dataset's, does not have are neither read nor decompressed.
        Raises DatasetCorrupt.
        """
        whole = self.description.schema
        schema = schema or whole
        marks = NEXT + column_name(whole.carried[0])
        columns = None if schema == whole else (*schema.columns(), marks)
        for record in part.records:
            with self.reading(part, record, columns) as reader:
                for number in range(reader.num_record_batches):
                    yield decode(schema, part.name, reader.get_batch(number), marks=marks)

    def iter_trajectories(
        self, *, parts: Sequence[DatasetPart] | None = None, schema: FrameSchema | None = None
    ) -> Iterator[Frames]:
        """Every trajectory of the dataset, or of some parts and leaves of it, whole, slot by slot, in the order in
        which they ended; cut ones last. A trajectory that a later attempt of its worker continued is one trajectory,
        under the name of the first part. `next` is stored only after the last frame. Holds the open trajectories of one
        worker.
        """
        slots = itertools.groupby(self.parts() if parts is None else parts, lambda part: split_part_name(part.name)[:2])
        for _, attempts in slots:
            held: dict[int, list[Frames]] = {}
            for frames in itertools.chain.from_iterable(self.iter_frames(part, schema) for part in attempts):
                for piece in frames.by_trajectory():
                    pieces = held.setdefault(int(piece.env[0]), [])
                    if pieces:
                        last = pieces[-1]
                        if last.traj_id[-1] != piece.traj_id[0] or last.step[-1] + 1 != piece.step[0]:
                            yield joined(pieces)
                            pieces.clear()
                    pieces.append(piece)
                    if not piece.is_cut:
                        yield joined(held.pop(int(piece.env[0])))
            yield from map(joined, held.values())

    @contextmanager
    def reading(self, part: DatasetPart, record: ShardRecord, columns: Collection[str] | None = None) -> Iterator[Any]:
        """Open one shard, with all or the given columns, as a pyarrow.ipc.RecordBatchFileReader. Raises DatasetCorrupt
        where it is missing, not an Arrow file, or of another schema; DatasetError where this process may map or open no
        more.
        """
        where = f"{self.uri}/{part.name}/{record.shard}"
        try:
            schema, chosen = self.description.schema, None
            # Arrow copies columns that it is told to choose: worth it where it would decompress the others.
            if columns is not None and schema.is_compressed:
                chosen = [place for place, name in enumerate(schema.columns()) if name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=chosen)
            reader = pa.ipc.open_file(self.store.open(part.name, record.shard), options=options)
            stored = (reader.schema.metadata or {}).get(b"cormorant.schema", b"").decode()
            if stored != schema.fingerprint():
                raise DatasetCorrupt(
                    f"{where} has the schema {stored or 'of another program'}, the dataset's is "
                    f"{schema.fingerprint()}; it does not belong here"
                )
            yield reader
        except GeneratorExit:  # at the interpreter's end pyarrow has no errors any more
            raise
        except FileNotFoundError as error:
            raise DatasetCorrupt(f"{where} is missing; restore it from a copy") from error
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                raise DatasetError(
                    f"{where} cannot be mapped into memory: {error}; hold fewer frames at once, or raise the limit "
                    "(vm.overcommit_memory, ulimit -n)"
                ) from error
            raise DatasetCorrupt(f"{where} cannot be read: {error}; restore it from a copy") from error


def find_dataset(uri: str) -> StoredDataset | None:
    """The dataset at a URI, or None if nothing is there yet. Raises DatasetError where it cannot be read."""
    store = open_store(uri)
    with _explained(uri):
        data = store.read_root(DESCRIPTION)
    if data is None:
        return None
    return StoredDataset(store, DatasetDescription.from_bytes(data, where=f"{uri}/{DESCRIPTION}"))


def existing_dataset(uri: str) -> StoredDataset:
    """The dataset at a URI. Raises DatasetError where there is none, or it cannot be read."""
    dataset = find_dataset(uri)
    if dataset is None:
        raise DatasetError(f"there is no dataset at {uri}: {DESCRIPTION} is missing; check the URI")
    return dataset


def open_dataset(uri: str, description: DatasetDescription) -> StoredDataset:
    """Create a dataset at a URI, or continue the existing one. Called by every process that writes. Raises
    DatasetMismatch with each difference of environment or leaves, DatasetError where it cannot be made, read or
    written.
    """
    dataset = find_dataset(uri)
    if dataset is None:
        store = open_store(uri)
        with _explained(uri, done="written"):
            store.write_root(DESCRIPTION, description.to_bytes(), is_first=True)
        # Another process may have come first: its description counts.
        dataset = existing_dataset(uri)
    _refuse(uri, dataset.description.differences(description))
    return dataset


def _refuse(uri: str, differences: tuple[str, ...]) -> None:
    if differences:
        raise DatasetMismatch(
            f"the dataset at {uri} does not match this job: {'; '.join(differences)}. "
            "Use another URI, or run the job that created the dataset"
        )


@contextmanager
def _explained(where: str, *, done: str = "read") -> Iterator[None]:
    """Turn what a store says into a sentence. `done`: read or written."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise DatasetError(f"{where} is not a folder; give the dataset its own folder") from error
    except OSError as error:
        remedy = "; choose another URI" if done == "written" else ""
        if isinstance(error, PermissionError) and "://" in where:
            remedy = "; check the credentials, and that they allow to list, read and write it"
        raise DatasetError(f"{where} cannot be {done}: {error.strerror or error}{remedy}") from error


def split_part_name(name: str) -> tuple[str, int, int]:
    match = _PART.fullmatch(name)
    return (match["group"], int(match["index"]), int(match["attempt"])) if match else (name, 0, 0)
