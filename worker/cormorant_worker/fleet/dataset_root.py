"""The fleet's side of a dataset: opened once, so that workers only append to their own parts.

Imported only by fleets that have a dataset: pyarrow takes a while to load.
"""

import json
import os
import socket
import uuid
from collections import Counter
from collections.abc import Sequence

from cormorant_contract.disk import local_path
from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import DatasetError
from cormorant_worker.fleet.scheduler import SlotKey
from cormorant_worker.lock import FolderLock, LockHeld
from cormorant_worker.normalize import Statistics
from cormorant_worker.sinks.dataset import find_dataset, open_dataset, split_part_name
from cormorant_worker.sinks.description import describe_job
from cormorant_worker.worker.messages import Ready


class DatasetRoot:
    """A dataset to which only this fleet adds. It is scanned once."""

    def __init__(self, uri: str, *, job: str = "", epoch: int = 0) -> None:
        """Lock the place and look at it, before any worker starts. Workers of the job's earlier heads have ended, or
        are told to when they write again. `epoch`: the fleet's, unless the dataset has seen as high a one. Raises
        DatasetError where it cannot be read or written, or another process writes to it.
        """
        self.uri = uri
        self._lock = _lock(uri)
        try:
            self._dataset = dataset = find_dataset(uri)
            self.written: Counter[SlotKey] = Counter()
            """Durable frames of earlier runs, by slot."""
            self.attempts: dict[SlotKey, int] = {}
            """The last attempt of each slot that had a part when this fleet began."""
            self.statistics = Statistics()
            """Moments of the durable frames of earlier runs; empty unless the manifest normalizes."""
            runs: Sequence[int] = ()
            if dataset is not None:
                runs = dataset.runs()
                is_ours = all(json.loads(dataset.holder(run) or "{}").get("job") == job for run in runs)
                names = dataset.part_names()
                # Those that may still be written: of a slot's earlier attempts the fleet has seen the end.
                newest = {*{split_part_name(name)[:2]: name for name in names}.values()}
                for name in names:
                    part = dataset.part(name, has_ended=is_ours and name in newest)
                    group, index, attempt = split_part_name(name)
                    self.written[group, index] += part.frames
                    self.statistics = self.statistics.merged(part.statistics)
                    self.attempts[group, index] = max(attempt, self.attempts.get((group, index), -1))
            self.epoch = max(epoch, max(runs, default=-1) + 1)
            """Epoch of this writer: higher than any before."""
        except BaseException:
            self.close()
            raise

    @property
    def frames(self) -> int:
        return self.written.total()

    def durable_frames(self, part: str, *, is_over: bool) -> int:
        """Number of frames in a part's manifest; 0 for a part that was never written. `is_over`: its worker has closed
        it. A lost one may live on a node that is cut off: what it adds from now on does not count.
        """
        return 0 if self._dataset is None else self._dataset.part(part, has_ended=not is_over).frames

    def open(self, job: CollectorJob, ready: Ready) -> None:
        """Begin the dataset, or continue with one that fits. Raises DatasetError, such as DatasetMismatch."""
        spaces = ready.observation_space, ready.action_space
        self._dataset = open_dataset(self.uri, describe_job(job, ready.layout, *spaces))
        holder = {"job": job.metadata.name, "host": socket.gethostname(), "pid": os.getpid(), "run": uuid.uuid4().hex}
        self._dataset.begin_run(self.epoch, json.dumps(holder).encode())

    def close(self) -> None:
        """Release the dataset for other writers. May be called twice."""
        if self._lock is not None:
            self._lock.release()


def _lock(uri: str) -> FolderLock | None:
    path = local_path(uri)
    if path is None:
        return None  # object stores have no locks: see `Dataset.begin_run`
    try:
        return FolderLock(path)
    except LockHeld as error:
        raise DatasetError(f"the dataset {error}; stop that run first, or give this job another URI") from None
    except OSError as error:
        raise DatasetError(f"{uri} cannot be written: {error.strerror or error}; choose another URI") from error
