"""Numbers that a job reports of every episode beside its return and length, made of declared keys of info.

Computed once a batch, from the info that its block stores anyway: the hot loop does nothing for them.

# M metrics, T rows, B columns, S runs of frames of one trajectory in one column, k episodes that ended
"""

from collections.abc import Mapping, Sequence, Set

import numpy as np
import structlog

from cormorant_contract.info import EpisodeMetric
from cormorant_worker.collect.block import Block
from cormorant_worker.errors import ManifestError
from cormorant_worker.spaces import Array, Leaf

log = structlog.get_logger()

_FOLDS = {"sum": np.add, "mean": np.add, "max": np.maximum, "any": np.maximum}
"""How the values of an episode become one; NaN stays NaN in all of them. `any` is about absolute values."""


class EpisodeMetrics:
    """Metrics over one collector's batches, each given once and in order. Owned by its `Trajectories`."""

    def __init__(self, metrics: Sequence[EpisodeMetric], info: Sequence[Leaf], num_envs: int) -> None:
        """Begin.

        Raises:
            ManifestError: a metric reads a key that is no single number, or is not there.
        """
        self._metrics = tuple(metrics)
        self._leaves = [_find(metric, info) for metric in metrics]
        self._kept: Array = np.zeros((len(self._metrics), num_envs))
        """[M, B] float64: what the episode of each column's last frame had gathered by then."""
        self._ids: Array = np.full(num_envs, -1, dtype=np.int64)
        """[B] the trajectory of that frame."""
        self._is_warned: set[str] = set()

    def of(self, block: Block, *, lengths: Sequence[int], lost: Set[int]) -> dict[str, list[float]]:
        """The metrics of the episodes that ended in a batch, by name, in the order of the block's ends.

        Args:
            block: complete.
            lengths: [k] frames of these episodes.
            lost: ids of trajectories that ended in a crash, and are no episodes.
        """
        if not self._metrics:
            return {}
        rows, columns = block.end_rows[: block.num_ends], block.end_columns[: block.num_ends]
        if lost:
            kept = ~np.isin(block.traj_ids[rows, columns], list(lost))
            rows, columns = rows[kept], columns[kept]
        if any(metric.reduce != "last" for metric in self._metrics):
            runs = _Runs(block)
            ended, last = runs.at(rows, columns), runs.at(runs.last_rows, runs.filled)
            goes_on = runs.first_ids == self._ids[runs.filled]
            self._ids[runs.filled] = runs.last_ids
        found = {}
        for metric, leaf, kept in zip(self._metrics, self._leaves, self._kept, strict=True):
            if metric.reduce == "last":
                values = block.info[leaf][rows, columns].astype(np.float64)
            else:
                gathered = runs.fold(metric, block.info[leaf])
                first = gathered[runs.first]
                gathered[runs.first] = np.where(goes_on, _FOLDS[metric.reduce](first, kept[runs.filled]), first)
                kept[runs.filled] = gathered[last]
                values = _finished(metric, gathered[ended], np.asarray(lengths))
            found[metric.name] = values.tolist()
            self._warn(metric, values)
        return found

    def of_episode(self, info: Sequence[Array]) -> dict[str, float]:
        """The metrics of one whole episode: [length] of each leaf of its info."""
        found = {}
        for metric, leaf in zip(self._metrics, self._leaves, strict=True):
            values = info[leaf].astype(np.float64)
            if metric.reduce != "last":
                values = _FOLDS[metric.reduce].reduce(np.abs(values) if metric.reduce == "any" else values)[None]
            found[metric.name] = float(_finished(metric, values[-1:], np.array([len(info[leaf])]))[0])
        return found

    def _warn(self, metric: EpisodeMetric, values: Array) -> None:
        if metric.name in self._is_warned or np.isfinite(values).all():
            return
        self._is_warned.add(metric.name)
        log.warning(
            "episode_metric_not_finite",
            metric=metric.name,
            value=float(values[~np.isfinite(values)][0]),
            hint=f"a step had no {metric.key} in its info, or NaN; such episodes are left out of means. Declare a fill "
            f"for {metric.key} in env.info to count such steps. Said once.",
        )

    def state(self, ids: Array) -> dict[str, Array]:
        """What the open episodes, of the trajectories `ids` [B], have gathered, by name."""
        first = [-np.inf if metric.reduce == "max" else 0.0 for metric in self._metrics]
        return {
            f"metric.{metric.name}": np.where(ids == self._ids, kept, start)
            for metric, kept, start in zip(self._metrics, self._kept, first, strict=True)
        }

    def restore(self, state: Mapping[str, Array], ids: Array) -> None:
        """Go on from `state()`, in the trajectories `ids`. What it knows nothing of is NaN until the open episodes
        end.
        """
        self._ids[:] = ids
        for metric, kept in zip(self._metrics, self._kept, strict=True):
            kept[:] = state.get(f"metric.{metric.name}", np.nan)


class _Runs:
    """The runs of frames of one trajectory in each column of a block, column after column."""

    def __init__(self, block: Block) -> None:
        rows, lengths = block.num_rows, block.lengths
        ids = block.traj_ids[:rows].T
        begins = np.ones(ids.shape, dtype=np.bool_)
        np.not_equal(ids[:, 1:], ids[:, :-1], out=begins[:, 1:])
        if not block.is_full:
            short = np.flatnonzero(lengths < rows)
            begins[short, lengths[short]] = True  # what an earlier batch left there is a run of its own
        self._rows = rows
        self._begins = np.flatnonzero(begins)
        """[S] positions in the columns, one after the other."""
        self.filled = np.flatnonzero(lengths)
        """[F] columns with frames."""
        self.last_rows = lengths[self.filled] - 1
        self.first = self.at(0, self.filled)
        """[F] their first runs."""
        self.first_ids, self.last_ids = ids[self.filled, 0], ids[self.filled, self.last_rows]

    def at(self, rows: Array | int, columns: Array) -> Array:
        """The runs of these frames."""
        found: Array = np.searchsorted(self._begins, columns * self._rows + rows, side="right") - 1
        return found

    def fold(self, metric: EpisodeMetric, info: Array) -> Array:
        """[S] float64, of a leaf [T, B]."""
        values = np.ascontiguousarray(info[: self._rows].T, dtype=np.float64).reshape(-1)
        gathered: Array = _FOLDS[metric.reduce].reduceat(
            np.abs(values) if metric.reduce == "any" else values, self._begins
        )
        return gathered


def _finished(metric: EpisodeMetric, gathered: Array, lengths: Array) -> Array:
    match metric.reduce:
        case "mean":
            return gathered / lengths
        case "any":
            return np.sign(gathered)
        case _:
            return gathered


def _find(metric: EpisodeMetric, info: Sequence[Leaf]) -> int:
    for i, leaf in enumerate(info):
        if leaf.key[-1] == metric.key:
            if leaf.shape:
                raise ManifestError(
                    f"spec.collection.episodeMetrics: {metric.name} reads {metric.key}, whose values have the shape "
                    f"{list(leaf.shape)}; a metric is made of single numbers: use another key, or a wrapper"
                )
            return i
    raise ManifestError(
        f"spec.collection.episodeMetrics: {metric.name} reads {metric.key}, which env.info does not declare"
    )
