"""The open trajectory of each environment, its return so far, and the moments of batches. Owned by one collector.

A trajectory id is unique in the job, including later heads:

    63 bits = group (3) | slot index (14) | epoch (12) | n-th trajectory of this slot in this epoch (34)

An epoch is one fleet: a head, or one run that writes to a dataset. Within an epoch the n-th process of a slot begins
at n * 2^24, or higher if its predecessors got further. docs/decisions/0032 says why.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cormorant_contract.info import EpisodeMetric
from cormorant_worker.collect.block import Block, Carry
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import CormorantError, EnvError, ManifestError
from cormorant_worker.normalize import REWARD, RunningMoments, Statistics
from cormorant_worker.policy.normalizer import Normalizer
from cormorant_worker.spaces import Array, Leaf

_GROUP_BITS, _INDEX_BITS, _EPOCH_BITS, _COUNTER_BITS = 3, 14, 12, 34
_ATTEMPT_STEP_BITS = 24
MAX_EPOCH = (1 << _EPOCH_BITS) - 1
"""Highest epoch; epochs count from 0."""

_FOLDS = {"sum": np.add, "mean": np.add, "max": np.maximum, "any": np.maximum}
"""How the values of an episode become one metric; NaN stays NaN in all of them. `any` is about absolute values."""


def trajectory_base(path: WorkerPlace) -> int:
    """The lowest trajectory id of a worker: group, index and epoch are its upper bits."""
    base = 0
    for name, number, bits in (
        ("worker group", path.group_number, _GROUP_BITS),
        ("worker index", path.index, _INDEX_BITS),
        ("epoch", path.epoch, _EPOCH_BITS),
    ):
        if not 0 <= number < 1 << bits:
            raise CormorantError(
                f"{name} {number} does not fit a trajectory id: at most {(1 << bits) - 1}; start a new job"
            )
        base = base << bits | number
    base <<= _COUNTER_BITS
    # The ids of the first 512 attempts tell them apart. Later ones begin where their predecessors ended, in the other
    # half.
    step = path.attempt << _ATTEMPT_STEP_BITS
    return max(base + step if step < 1 << (_COUNTER_BITS - 1) else base, path.first_trajectory)


@dataclass(slots=True)
class Episodes:
    """Episodes that ended while a batch was collected, in the order in which they ended."""

    returns: list[float] = field(default_factory=list)
    """Undiscounted sums of rewards."""
    lengths: list[int] = field(default_factory=list)
    """Frames."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Episode metrics of the manifest, by name."""
    tasks: list[str] = field(default_factory=list)
    """Names of the variants that were played; none without variants."""
    num_terminated: int = 0
    """Episodes that the environment ended; the rest were truncated."""


class EpisodeTally:
    """Returns and lengths of episodes, from blocks that are given once and in order."""

    def __init__(self, num_envs: int) -> None:
        self.frames, self.returns = Carry(num_envs), Carry(num_envs)
        """Of trajectories that were open when the last block ended."""

    def take(self, block: Block, lost: Collection[int]) -> tuple[Array, Array, Array, Array]:
        """Row and column of the last frame, return and length of each episode that ended in a complete block, in the
        order of its ends. `lost`: trajectories that ended with a crash of their environment; not counted as episodes.
        """
        runs, rows, columns = block.runs, block.end_rows[: block.num_ends], block.end_columns[: block.num_ends]
        lengths = self.frames.gather(runs, runs.lengths())
        returns = self.returns.gather(runs, runs.fold(np.add, block.reward[: block.num_rows]))
        if lost:
            is_episode = ~np.isin(block.traj_ids[rows, columns], list(lost))
            rows, columns = rows[is_episode], columns[is_episode]
        ended = runs.at(rows, columns)
        return rows, columns, returns[ended], lengths[ended].astype(np.int64)


class EpisodeMetrics:
    """Metrics of each episode beside its return and length, computed from declared keys of info, over one collector's
    batches, each given once and in order.
    """

    def __init__(self, metrics: Sequence[EpisodeMetric], info: Sequence[Leaf], num_envs: int) -> None:
        """Begin. Raises ManifestError where a metric reads a key that is missing, or is not a single number."""
        self._metrics = tuple(metrics)
        self._leaves: list[int] = []
        for metric in metrics:
            leaf = next((i for i, leaf in enumerate(info) if leaf.key[-1] == metric.key), None)
            reads = f"spec.collection.episodeMetrics: {metric.name} reads {metric.key}"
            if leaf is None:
                raise ManifestError(f"{reads}, which env.info does not declare")
            if info[leaf].shape:
                raise ManifestError(
                    f"{reads}, whose values have the shape {list(info[leaf].shape)}; a metric is made of single "
                    "numbers: use another key, or a wrapper"
                )
            self._leaves.append(leaf)
        self._open = [Carry(num_envs, start=-np.inf if each.reduce == "max" else 0.0) for each in self._metrics]

    def of(self, block: Block, rows: Array, columns: Array, *, lengths: Array) -> dict[str, list[float]]:
        """Metrics, by name, of the episodes that end at these frames of a complete block; `lengths` [k] frames."""
        metrics = {}
        for metric, leaf, so_far in zip(self._metrics, self._leaves, self._open, strict=True):
            info = block.info[leaf][: block.num_rows]
            if metric.reduce == "last":
                values = info[rows, columns].astype(np.float64)
            else:
                fold = _FOLDS[metric.reduce]
                gathered = block.runs.fold(fold, np.abs(info, dtype=np.float64) if metric.reduce == "any" else info)
                gathered = so_far.gather(block.runs, gathered, fold)
                values = _finished(metric, gathered[block.runs.at(rows, columns)], lengths)
            metrics[metric.name] = values.tolist()
        return metrics

    def of_episode(self, info: Sequence[Array]) -> dict[str, float]:
        """The metrics of one whole episode: [length] of each leaf of its info."""
        metrics = {}
        for metric, leaf in zip(self._metrics, self._leaves, strict=True):
            values = info[leaf].astype(np.float64)
            if metric.reduce != "last":
                values = _FOLDS[metric.reduce].reduce(np.abs(values) if metric.reduce == "any" else values)[None]
            metrics[metric.name] = float(_finished(metric, values[-1:], np.array([len(info[leaf])]))[0])
        return metrics

    def state(self, ids: Array) -> dict[str, Array]:
        """Running values of the open episodes of the trajectories `ids` [B], by name."""
        return {
            f"metric.{metric.name}": so_far.of(ids) for metric, so_far in zip(self._metrics, self._open, strict=True)
        }

    def restore(self, state: Mapping[str, Array], ids: Array) -> None:
        """Continue from `state()`, in the trajectories `ids`. Unknown metrics are NaN until the open episodes end."""
        for metric, so_far in zip(self._metrics, self._open, strict=True):
            so_far.go_on(ids, state.get(f"metric.{metric.name}", np.full(ids.shape, np.nan)))


def _finished(metric: EpisodeMetric, gathered: Array, lengths: Array) -> Array:
    match metric.reduce:
        case "mean":
            return gathered / lengths
        case "any":
            return np.sign(gathered)
        case _:
            return gathered


class Trajectories:
    """The open trajectory of each of B environments."""

    def __init__(self, num_envs: int, base: int, metrics: EpisodeMetrics, *, tasks: Sequence[str]) -> None:
        self._tasks = tuple(tasks)
        self.next_id = base
        """The id of the next trajectory that opens: higher than any before."""
        self.ids: Array = np.empty(num_envs, dtype=np.int64)
        """[B] int64, the id of the open trajectory."""
        self._tally = EpisodeTally(num_envs)
        self.metrics = metrics
        self.lost: set[int] = set()
        """Trajectories that a crash of their environment ended, in this batch or this call's episodes; not counted as
        episodes.
        """
        self.open(slice(None))

    def open(self, columns: slice | Array) -> None:
        self.ids[columns] = self.new_ids(len(self.ids[columns]))

    @property
    def lengths(self) -> Array:
        """[B] frames of the open trajectory in the batches so far."""
        return self._tally.frames.of(self.ids).astype(np.int64)

    def new_ids(self, count: int) -> Array:
        if self.next_id >> _COUNTER_BITS != self.next_id + count >> _COUNTER_BITS:
            raise CormorantError(
                f"this worker's slot has used up the 2^{_COUNTER_BITS} trajectory ids of an epoch; restart the job"
            )
        self.next_id += count
        return np.arange(self.next_id - count, self.next_id)

    def skip_to(self, base: int) -> None:
        """Use this id or higher ones for new trajectories. Never decreases."""
        self.next_id = max(self.next_id, base)

    def lose(self, columns: Array) -> None:
        """End the trajectories of crashed environments and begin new ones."""
        self.lost.update(self.ids[columns].tolist())
        self.open(columns)

    def episodes_of(self, block: Block) -> Episodes:
        """The episodes whose last frames are in a complete block. Called once for each block, in order."""
        rows, columns, returns, lengths = self._tally.take(block, self.lost)
        return Episodes(
            returns=returns.tolist(),
            lengths=lengths.tolist(),
            metrics=self.metrics.of(block, rows, columns, lengths=lengths),
            tasks=[self._tasks[column] for column in columns.tolist()] if self._tasks else [],
            num_terminated=int(np.count_nonzero(block.terminated[rows, columns])),
        )

    def state(self) -> dict[str, Array]:
        """Arrays from which `restore` continues with the same ids."""
        return {
            "next_id": np.array(self.next_id),
            "ids": self.ids.copy(),
            "lengths": self.lengths,
            "returns": self._tally.returns.of(self.ids),
        } | self.metrics.state(self.ids)

    def is_at(self, state: dict[str, Array]) -> bool:
        """True if nothing has happened since this result of `state()`."""
        ours = self.state()
        return all(
            name in state and np.array_equal(value.reshape(-1), state[name].reshape(-1), equal_nan=True)
            for name, value in ours.items()
        )

    def restore(self, state: dict[str, Array], *, keeps_ids: bool) -> None:
        """Continue from `state()`, with the open trajectories that it held.

        Ids are handed out once. New trajectories get ids above those of the state and those used here. Open ones keep
        their ids only if none of them has continued here in the meantime.
        """
        self.skip_to(int(state["next_id"].item()))  # an array of one: files know no scalars
        if keeps_ids:
            self.ids[:] = state["ids"]
        else:
            self.ids[:] = self.new_ids(len(self.ids))
        self._tally.frames.go_on(self.ids, state["lengths"])
        self._tally.returns.go_on(self.ids, state["returns"])
        self.metrics.restore(state, self.ids)


class BatchMoments:
    """Moments of one collector's batches for the statistics of its job, each given once and in order, over exactly its
    frames. Observations: the policy's inputs, [T, B], without final observations. Rewards: the discounted return of
    each frame, g_t = r_t + gamma * g_t-1, which continues over batches and begins again with each trajectory.
    """

    def __init__(self, normalizer: Normalizer, num_envs: int) -> None:
        self._names, self._settings = normalizer.names, normalizer.settings
        self.initial = normalizer.statistics
        """Statistics that the initial weights act with."""
        self.open_returns = Carry(num_envs)
        """Discounted returns."""

    def of(self, block: Block) -> Statistics:
        """Moments of a complete batch. Raises EnvError where a value is not finite."""
        rows, kept = block.num_rows, block.mask
        series: list[tuple[str, Array, float]] = []
        if (observation := self._settings.observation) is not None:
            named = zip(self._names, block.observation, strict=True)
            series += [(name, stored[:rows], observation.clip) for name, stored in named if name]
        if (reward := self._settings.reward) is not None:
            series.append((REWARD, self._returns(block, reward.gamma), reward.clip))
        moments: dict[str, RunningMoments] = {}
        for name, values, clip in series:
            frames = values.reshape(-1, *values.shape[2:]) if kept is None else values[kept]
            moments[name] = found = RunningMoments.of(frames, clip=clip)
            if not (np.isfinite(found.mean).all() and np.isfinite(found.m2).all()):
                raise EnvError(
                    f"an environment returned {name} that is not finite, or too large for statistics; correct the "
                    "environment, or name the other leaves in spec.collection.normalize.observation.keys"
                )
        return Statistics(moments)

    def _returns(self, block: Block, gamma: float) -> Array:
        """[T, B] float64, by a scan in log2(T) passes; garbage past a column's length."""
        rows, runs = block.num_rows, block.runs
        returns = block.reward[:rows].astype(np.float64)
        decay = np.where(runs.begins, 0.0, gamma)
        returns[0] += gamma * self.open_returns.of(runs.ids[0])
        span = 1
        while span < rows:
            # Row t holds its return over the last `span` rows, and what an earlier one is still worth there.
            returns[span:] += decay[span:] * returns[:-span]
            decay[span:] = decay[span:] * decay[:-span]
            span *= 2
        self.open_returns.keep(runs, returns[runs.last_rows, runs.filled])
        return returns
