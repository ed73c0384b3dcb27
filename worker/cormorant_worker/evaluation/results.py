"""Results of an evaluation: durable results of single episodes, the table made from them, and the book of those that
remain.

    <folder>/evaluation.json           what is evaluated, written first; the table, written last
    <folder>/played/<chunk>.json       episodes that were played, one file each time that a worker reports

A file is written once it is complete, under a name derived from its episodes: a chunk that is played again after its
worker died writes the same file again. Episodes without a file are played (again).
"""

import hashlib
import io
import json
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import fsspec

from cormorant_contract.env import KINDS
from cormorant_contract.episodes import PlannedEpisode
from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import EvaluationError, WeightsError
from cormorant_worker.sinks.stores import open_store

T = TypeVar("T")
_Z = 1.959963984540054
"""Quantile of the normal distribution for a 95 % interval."""
SUCCESS = ("is_success", "success")
"""Names of metrics that mark an episode as a success; the first existing one is used."""
_MOST_DEATHS = 3
"""After this many workers ended while they played the same episode, the evaluation fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    task: str
    seed: int
    options: Mapping[str, Any]
    total: float
    """The undiscounted return."""
    length: int
    terminated: bool
    """Whether the environment ended it; otherwise it was truncated."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite values of `collection.episodeMetrics` by name."""
    returns: Mapping[str, float] = field(default_factory=dict)
    """By group of agents, the sum of its agents' returns; empty: the environment has no groups."""
    checkpoint: str = ""
    """URI of the checkpoint, as in `PlannedEpisode`, where the job has several."""

    @property
    def key(self) -> str:
        return PlannedEpisode(seed=self.seed, options=self.options, task=self.task, checkpoint=self.checkpoint).key

    def document(self) -> dict[str, Any]:
        document = {"return" if name == "total" else name: value for name, value in asdict(self).items()}
        return {name: value for name, value in document.items() if value or name not in ("checkpoint", "returns")}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        fields = dict(document)
        return cls(total=fields.pop("return"), **fields)


def planned_episodes(job: CollectorJob) -> tuple[PlannedEpisode, ...]:
    collection = job.spec.collection
    assert collection.episodes is not None
    return collection.episodes.plan(collection.seed, job.spec.env.variants or (), job.spec.policy.playing)


class ResultFolder:
    """The folder of one evaluation of one checkpoint, at a path or any fsspec URI. Several processes write to it."""

    def __init__(self, uri: str) -> None:
        """Raises DatasetError where the URI cannot be opened; EvaluationError, as methods do, if it cannot be read."""
        self.uri = uri
        self._store = open_store(uri)
        # Read by every process: results wait for a store that restarts only where it has answered before.
        self._found = self._read("evaluation.json", lambda document: dict(document.get("subject", {})))

    def open(self, subject: Mapping[str, Any]) -> None:
        """Begin, or continue an earlier run of the same subject, of which a folder holds the results."""
        if (before := self._found) is None:
            self._write("evaluation.json", {"subject": dict(subject)})
            return
        if name := next((name for name in subject if before.get(name) != subject[name]), ""):
            raise EvaluationError(
                f"{self.uri} holds the results of another evaluation: {name} was {before.get(name)!r} and is "
                f"{subject[name]!r}; use another folder, or delete this one"
            )

    def record(self, played: Sequence[PlayedEpisode]) -> None:
        """Make episodes durable. Idempotent."""
        name = hashlib.sha256("\n".join(row.key for row in played).encode()).hexdigest()[:24]
        self._write(f"played/{name}.json", [row.document() for row in played])

    def played(self) -> dict[str, PlayedEpisode]:
        """Every recorded episode, by its key."""
        rows: dict[str, PlayedEpisode] = {}
        with self._explained("list played of"):
            # File systems keep files of their own, such as ._name, beside ours.
            names = [name for name in self._store.files("played") if name.endswith(".json") and name[0] != "."]
        for name in names:
            for row in self._read(f"played/{name}", lambda documents: [*map(PlayedEpisode.read, documents)]) or ():
                if (before := rows.setdefault(row.key, row)) != row:
                    raise EvaluationError(
                        f"the episode {row.key} was played twice with different results: {before.total!r} in "
                        f"{before.length} steps, then {row.total!r} in {row.length}; the environment or the policy "
                        "draws random numbers that no seed decides: seed them in the environment's reset"
                    )
        return rows

    def finish(self, subject: Mapping[str, Any], table: "ResultTable") -> None:
        """Write the table as JSON, beside the subject, and as Parquet."""
        table.write_parquet(file := io.BytesIO())
        with self._explained("write episodes.parquet to"):
            self._store.write_root("episodes.parquet", file.getvalue())
        self._write("evaluation.json", {"subject": dict(subject), **table.document()})

    def _write(self, name: str, document: object) -> None:
        with self._explained("write results to"):
            self._store.write_root(name, (json.dumps(document, sort_keys=True) + "\n").encode())

    def _read(self, name: str, parse: Callable[[Any], T]) -> T | None:
        with self._explained(f"read {name} of"):
            data = self._store.read_root(name)
            return None if data is None else parse(json.loads(data))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:  # all but the first: of a content
            raise EvaluationError(f"cannot {what} {self.uri}: {error}; repair it, or set another folder") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """Episodes in the order of the plan, with summaries. The same episodes give the same bytes."""

    planned: int
    """Episodes in the evaluation; those without a row have not been played yet."""
    episodes: tuple[PlayedEpisode, ...]
    num_checkpoints: int = 1

    @classmethod
    def of(cls, planned: Sequence[PlannedEpisode], played: Mapping[str, PlayedEpisode]) -> Self:
        rows = tuple(played[episode.key] for episode in planned if episode.key in played)
        return cls(
            planned=len(planned), episodes=rows, num_checkpoints=len({episode.checkpoint for episode in planned})
        )

    @property
    def is_complete(self) -> bool:
        return len(self.episodes) == self.planned

    @property
    def summary(self) -> dict[str, Any]:
        """Means with intervals, median, minimum and maximum over all episodes."""
        return summarize(self.episodes)

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """The summary by task; empty with a single task."""
        names = dict.fromkeys(row.task for row in self.episodes)
        if set(names) <= {""}:
            return {}
        return {name: summarize([row for row in self.episodes if row.task == name]) for name in names}

    @property
    def checkpoints(self) -> dict[str, "ResultTable"]:
        """By weights file or pairing, the table of a separate evaluation; empty without
        `collection.episodes.checkpoints`.
        """
        by_checkpoint: dict[str, list[PlayedEpisode]] = {}
        for row in self.episodes:
            by_checkpoint.setdefault(row.checkpoint, []).append(replace(row, checkpoint=""))
        if set(by_checkpoint) <= {""}:
            return {}
        return {
            uri: ResultTable(planned=self.planned // self.num_checkpoints, episodes=tuple(rows))
            for uri, rows in by_checkpoint.items()
        }

    def document(self) -> dict[str, Any]:
        apart = {
            uri: {"planned": each.planned, "summary": each.summary, "tasks": each.tasks}
            for uri, each in self.checkpoints.items()
        }
        return {
            **({"checkpoints": apart} if apart else {}),
            "planned": self.planned,
            "summary": self.summary,
            "tasks": self.tasks,
            "episodes": [row.document() for row in self.episodes],
        }

    def to_json(self) -> str:
        return json.dumps(self.document(), sort_keys=True, indent=1) + "\n"

    def write_parquet(self, file: str | Path | IO[bytes]) -> None:
        """Write one row per episode: options as JSON text, one column per metric."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = self.episodes
        columns: dict[str, Any] = {"checkpoint": [row.checkpoint for row in rows]} if self.num_checkpoints > 1 else {}
        columns |= {
            "task": [row.task for row in rows],
            "seed": [row.seed for row in rows],
            "options": [json.dumps(dict(row.options), sort_keys=True) for row in rows],
            "return": [row.total for row in rows],
            "length": [row.length for row in rows],
            "terminated": [row.terminated for row in rows],
        }
        for name in sorted({name for row in rows for name in row.returns}):
            columns[f"returns.{name}"] = [row.returns.get(name) for row in rows]
        for name in sorted({name for row in rows for name in row.metrics}):
            columns[f"metrics.{name}"] = [row.metrics.get(name) for row in rows]
        pq.write_table(pa.table(columns), file)


def summarize(rows: Sequence[PlayedEpisode]) -> dict[str, Any]:
    """Count, mean and spread of returns (also by group of agents), lengths and metrics, and the rate of success."""
    stats: dict[str, Any] = {"episodes": len(rows)}
    if not rows:
        return stats
    stats["return"] = _spread([row.total for row in rows])
    stats["length"] = _spread([float(row.length) for row in rows])
    stats["terminated"] = sum(row.terminated for row in rows)
    if groups := sorted({group for row in rows for group in row.returns}):
        returns = [row.returns for row in rows if row.returns]
        stats["groups"] = {group: {"return": _spread([row[group] for row in returns])} for group in groups}
        # In how many episodes a group's return was above, at and below the best other group's.
        for group, of_group in stats["groups"].items() if len(groups) > 1 else ():
            ahead = [row[group] - max(value for name, value in row.items() if name != group) for row in returns]
            wins, losses = sum(by > 0 for by in ahead), sum(by < 0 for by in ahead)
            of_group |= {"wins": wins, "draws": ahead.count(0), "losses": losses}
    if names := sorted({name for row in rows for name in row.metrics}):
        stats["metrics"] = {name: _spread([row.metrics[name] for row in rows if name in row.metrics]) for name in names}
    if success := next((name for name in SUCCESS if name in names), None):
        said = [row.metrics[success] for row in rows if success in row.metrics]
        successes = sum(value > 0 for value in said)
        low, high = wilson(successes, len(said))
        stats["success"] = {
            "rate": successes / len(said),
            "successes": successes,
            "episodes": len(said),
            "low": low,
            "high": high,
        }
    return stats


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean with its 95 % interval (normal approximation), standard deviation (n - 1), and range."""
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0
    half = _Z * deviation / math.sqrt(len(values))
    return {
        "mean": mean,
        "low": mean - half,
        "high": mean + half,
        "std": deviation,
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
    }


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate (Wilson 1927): right for few trials, and for rates near 0 and 1."""
    rate, z2 = successes / trials, _Z * _Z
    center = rate + z2 / (2 * trials)
    half = _Z * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials))
    low, high = (center - half) / (1 + z2 / trials), (center + half) / (1 + z2 / trials)
    return (0.0 if not successes else low), (1.0 if successes == trials else high)


def name_of(planned: PlannedEpisode) -> str:
    """Describe an episode in messages: its task, seed and options."""
    task = f"task {planned.task}, " if planned.task else ""
    return f"{task}seed {planned.seed}" + (f" and options {dict(planned.options)}" if planned.options else "")


class EpisodeBook:
    """Remaining episodes of an evaluation: a fleet has one, and hands its episodes out with tickets. Guarded by the
    fleet's condition, except `table` and `finish`, which read the folder.
    """

    def __init__(self, job: CollectorJob) -> None:
        """Look at what earlier fleets recorded. Raises EvaluationError: the folder cannot be used, or holds other
        results.
        """
        assert job.spec.output.dataset is not None
        self.planned = planned_episodes(job)
        self._subject = subject_of(job)
        self._folder = ResultFolder(job.spec.output.dataset.uri)
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


def subject_of(job: CollectorJob) -> dict[str, Any]:
    """Settings that determine an episode's numbers besides its seed, as JSON. New fields of env and policy count."""
    spec, episodes = job.spec, job.spec.collection.episodes
    assert episodes is not None
    uris = episodes.checkpoints or ([spec.policy.initial_weights] if spec.policy.initial_weights else [])
    document = spec.to_document()
    env, policy, collection = document["env"], document["policy"], document["collection"]
    kind = next(kind for kind in KINDS if kind in env)
    env[kind] = spec.env.block.identity()
    env.pop("recycle", None)
    # Weights count by their digests. An evaluation calls the policy as it is written, whatever compile says.
    for name in ("initialWeights", "allowNonfinite", "compile"):
        policy.pop(name, None)
    collection = {name: value for name, value in collection.items() if name in ("episodeMetrics", "normalize")}
    collection.get("normalize", {}).pop("reward", None)
    collection["episodes"] = {"deterministic": episodes.deterministic}
    subject: dict[str, Any] = {name: document[name] for name in ("env", "policy", "code", "image") if name in document}
    subject["collection"] = collection
    devices = sorted({group.device for group in spec.worker_groups if not group.serves})
    digests = []
    for uri in uris:
        try:
            with fsspec.open(uri, "rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except FileNotFoundError as error:
            raise WeightsError(f"cannot read weights from {uri}: there is no such file; correct its path") from error
        except (OSError, ValueError, ImportError) as error:
            raise WeightsError(f"cannot read weights from {uri}: {error}") from error
    weights: Any = dict(zip(uris, digests, strict=True)) if episodes.checkpoints else "".join(digests)
    return {**subject, "devices": devices, "weights": weights}
