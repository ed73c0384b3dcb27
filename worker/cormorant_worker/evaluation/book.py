"""Which episodes of an evaluation are still to be played. A fleet has one, and hands its episodes out with tickets."""

import hashlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import fsspec

from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import EvaluationError
from cormorant_worker.evaluation.results import ResultFolder, ResultTable, missing, planned_episodes


class EpisodeBook:
    """Guarded by the fleet's condition, but for `table` and `finish`, which ask the folder."""

    def __init__(self, job: CollectorJob) -> None:
        """Look at what earlier fleets of the job recorded.

        Raises:
            EvaluationError: the folder cannot be used, or holds the results of something else.
        """
        assert job.spec.output.dataset is not None
        self.planned = planned_episodes(job)
        self._folder = ResultFolder(job.spec.output.dataset.uri)
        self._subject = subject_of(job)
        self._folder.open(self._subject)
        self._pending = deque(missing(self.planned, self._folder.played()))
        self.found = len(self.planned) - len(self._pending)
        """Episodes that earlier fleets played."""

    @property
    def num_pending(self) -> int:
        """Episodes that no ticket has and that are not played."""
        return len(self._pending)

    def chunk_size(self, *, num_envs: int, num_workers: int) -> int:
        """Episodes of one ticket: as many as step side by side, and fewer where others would have none."""
        return max(1, min(num_envs, -(-len(self._pending) // max(1, num_workers))))

    def take(self, count: int) -> tuple[int, ...]:
        """Positions of episodes for a ticket."""
        return tuple(self._pending.popleft() for _ in range(count))

    def give_back(self, episodes: Iterable[int]) -> None:
        """Their worker is gone: they are played again, before others."""
        self._pending.extendleft(reversed(tuple(episodes)))

    def table(self) -> ResultTable:
        """What is recorded by now. Takes as long as the folder takes to read."""
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


_NOT_OF_POLICY = frozenset({"initialWeights", "allowNonfinite"})
"""Fields that change no result: weights count by their digest."""


def subject_of(job: CollectorJob) -> dict[str, Any]:
    """What decides an episode's result beside its seed, in JSON."""
    spec, episodes = job.spec, job.spec.collection.episodes
    assert episodes is not None
    policy = spec.policy
    if episodes.checkpoints is not None:
        weights: Any = {uri: digest_of(uri) for uri in episodes.checkpoints}
    else:
        weights = digest_of(policy.initial_weights) if policy.initial_weights else ""
    return {
        "env": _without_speed(spec.env.to_document()),
        "policy": {name: value for name, value in policy.to_document().items() if name not in _NOT_OF_POLICY},
        "deterministic": episodes.deterministic,
        "weights": weights,
    }


def _without_speed(env: dict[str, Any]) -> dict[str, Any]:
    """Without what decides how fast environments step and not what they do."""
    speed = {"numEnvs", "batchSize", "numThreads", "vectorization", "stepTimeoutSeconds", "resetTimeoutSeconds"}
    return {
        name: _without_speed(value) if isinstance(value, dict) and name != "kwargs" else value
        for name, value in env.items()
        if name not in speed | {"maxRestarts"}
    }


def digest_of(uri: str) -> str:
    try:
        with fsspec.open(uri, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, ImportError) as error:
        raise EvaluationError(f"cannot read weights from {uri}: {error}") from error
