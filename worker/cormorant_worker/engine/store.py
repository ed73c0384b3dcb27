"""The fleet's side of a dataset: opened once, so that workers only append to parts of their own.

Imported only by fleets that have a dataset: pyarrow takes a while to load.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cormorant_contract.job import CollectorJob
from cormorant_worker.block import Layout
from cormorant_worker.engine.messages import Ready
from cormorant_worker.engine.schedule import Slot
from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks.dataset import find_dataset, open_dataset
from cormorant_worker.sinks.description import DatasetDescription
from cormorant_worker.sinks.local_store import local_path
from cormorant_worker.spaces import Space


class DatasetRoot:
    """A dataset that this fleet adds to."""

    def __init__(self, uri: str) -> None:
        """Look at the place before any worker starts.

        Raises:
            DatasetError: it cannot be read or written.
        """
        self.uri = uri
        _refuse_unwritable(uri)
        self._dataset = find_dataset(uri)

    def next_attempt(self, slot: Slot) -> int:
        """The first attempt of a slot that has no part yet: 0 in a new dataset."""
        return self._dataset.next_attempt(*slot) if self._dataset is not None else 0

    def open(self, job: CollectorJob, ready: Ready) -> None:
        """Begin the dataset, or go on with one that fits.

        Raises:
            DatasetMismatch: what is there comes from another environment or schema.
        """
        spaces = ready.observation_space, ready.action_space
        self._dataset = open_dataset(self.uri, describe_job(job, ready.layout, *spaces))

    @property
    def frames(self) -> int:
        """Durable frames of earlier runs."""
        return self._dataset.frames if self._dataset is not None else 0


def describe_job(job: CollectorJob, layout: Layout, observation: Space, action: Space) -> DatasetDescription:
    """What a dataset says about the job that fills it; the same in the fleet and in its workers."""
    document = job.to_document()
    manifest = json.dumps(document, sort_keys=True).encode()
    return DatasetDescription.of(
        _describe_env(job),
        observation,
        action,
        layout,
        job=job.metadata.name,
        seed=job.spec.collection.seed,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
    )


def _describe_env(job: CollectorJob) -> dict[str, Any]:
    """What tells environments apart, and nothing of how many there are or who steps them."""
    env = job.spec.env
    limit = {"maxEpisodeSteps": env.max_episode_steps}
    if env.envpool is not None:
        return {"envpool": {"taskId": env.envpool.task_id, "kwargs": dict(env.envpool.kwargs)}, **limit}
    assert env.gymnasium is not None
    wrappers = [wrapper.to_document() for wrapper in env.gymnasium.wrappers]
    named = {"id": env.gymnasium.id} if env.gymnasium.id else {"entrypoint": env.gymnasium.entrypoint}
    return {"gymnasium": {**named, "kwargs": dict(env.gymnasium.kwargs), "wrappers": wrappers}, **limit}


def _refuse_unwritable(uri: str) -> None:
    path = local_path(uri)
    if path is None:
        return
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise DatasetError(f"{uri} cannot be a folder: {existing} is a file; choose another URI")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DatasetError(f"{uri} cannot be written: no permission to write in {Path(existing)}; choose another URI")
