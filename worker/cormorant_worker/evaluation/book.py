"""Remaining episodes of an evaluation. A fleet has one book, and hands its episodes out with tickets."""

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import fsspec
from pydantic.alias_generators import to_camel

from cormorant_contract.env import KINDS
from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import EvaluationError
from cormorant_worker.evaluation.results import ResultFolder, ResultTable, name_of, planned_episodes

_MOST_DEATHS = 3


class EpisodeBook:
    """Guarded by the fleet's condition, except `table` and `finish`, which read the folder."""

    def __init__(self, job: CollectorJob) -> None:
        """Look at what earlier fleets recorded. Raises EvaluationError: the folder cannot be used, or holds other
        results.
        """
        assert job.spec.output.dataset is not None
        self.planned = planned_episodes(job)
        self._folder = ResultFolder(job.spec.output.dataset.uri)
        self._subject = subject_of(job)
        self._folder.open(self._subject)
        self._deaths: Counter[int] = Counter()
        """Workers that ended while they played an episode."""
        played = self._folder.played()
        self.pending = deque(i for i, episode in enumerate(self.planned) if episode.key not in played)
        """Positions of episodes that are neither played nor in a ticket."""
        self.found = len(self.planned) - len(self.pending)
        """Episodes that earlier fleets played."""

    def chunk_size(self, *, num_envs: int, num_workers: int) -> int:
        """Episodes per ticket: as many as step in parallel, or fewer so that every worker gets some."""
        return max(1, min(num_envs, -(-len(self.pending) // max(1, num_workers))))

    def take(self, count: int) -> tuple[int, ...]:
        """Positions of episodes for a ticket; after a death a single one, to find the one that kills workers."""
        taken = [self.pending.popleft()]
        while len(taken) < count and not self._deaths[taken[0]] and not self._deaths[self.pending[0]]:
            taken.append(self.pending.popleft())
        return tuple(taken)

    def give_back(self, episodes: Sequence[int]) -> str:
        """Play a lost worker's episodes again, before others. Returns why another worker would die as well; empty: it
        need not.
        """
        self.pending.extendleft(reversed(episodes))
        self._deaths.update(episodes)
        if len(episodes) != 1 or (deaths := self._deaths[episodes[0]]) < _MOST_DEATHS:
            return ""
        named = name_of(self.planned[episodes[0]])
        return f"{deaths} workers ended while they played the episode with {named}: fix the environment or the policy"

    def table(self) -> ResultTable:
        """Table of the results so far. Reads the folder."""
        return ResultTable.of(self.planned, self._folder.played())

    def finish(self) -> ResultTable:
        table = self.table()
        if not table.is_complete:
            raise EvaluationError(
                f"{table.planned - len(table.episodes)} of {table.planned} episodes were played and are not in "
                f"{self._folder.uri}: their files were deleted meanwhile; start the evaluation again"
            )
        self._folder.finish(self._subject, table)
        return table


_CHANGES_NO_NUMBER = (
    # How fast environments step, and when one counts as hung.
    *(f"env.{kind}.{to_camel(name)}" for kind, block in KINDS.items() for name in block.tuning),
    "env.recycle",
    # Weights count by their digests. An evaluation calls the policy as it is written, whatever compile says.
    *(f"policy.{name}" for name in ("initialWeights", "allowNonfinite", "compile")),
    # An episode is stored under its checkpoint, task, seed and options.
    *(f"collection.episodes.{name}" for name in ("count", "seeds", "resetOptions", "perTask", "checkpoints")),
    "collection.seed",
    # Collecting, delivering and post-processing frames.
    *(f"collection.{name}" for name in ("mode", "framesPerBatch", "totalFrames", "initRandomFrames", "bfloat16")),
    *(f"collection.{name}" for name in ("maxFramesPerTrajectory", "resetAtEachBatch", "splitTrajectories")),
    *(f"collection.{name}" for name in ("multiStep", "preemptiveThreshold", "weights", "normalize.reward")),
    # Pods and the job's life. Of worker groups the device counts.
    *("output", "head", "workerGroups", "inference", "elasticGroup", "replicas"),
    *("suspend", "paused", "runPolicy", "managedBy"),
)
"""Fields of the spec that change no number of an episode."""


def subject_of(job: CollectorJob) -> dict[str, Any]:
    """Settings that determine an episode's numbers besides its seed, as JSON. New fields of the spec count."""
    spec, episodes = job.spec, job.spec.collection.episodes
    assert episodes is not None
    uris = episodes.checkpoints or ([spec.policy.initial_weights] if spec.policy.initial_weights else [])
    subject: dict[str, Any] = spec.to_document()
    for path in _CHANGES_NO_NUMBER:
        *blocks, name = path.split(".")
        parent: Any = subject
        for block in blocks:
            parent = parent.get(block, {})
        parent.pop(name, None)
    devices = sorted({group.device for group in spec.worker_groups if not group.serves})
    digests = []
    for uri in uris:
        try:
            with fsspec.open(uri, "rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except FileNotFoundError as error:
            raise EvaluationError(f"cannot read weights from {uri}: there is no such file; correct its path") from error
        except (OSError, ValueError, ImportError) as error:
            raise EvaluationError(f"cannot read weights from {uri}: {error}") from error
    weights: Any = dict(zip(uris, digests, strict=True)) if episodes.checkpoints else "".join(digests)
    return {**subject, "devices": devices, "weights": weights}
