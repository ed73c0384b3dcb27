"""Numbers that a job reports of every episode beside its return and length, made of declared keys of info.

Computed once a batch, from the info that its block stores anyway: the hot loop does nothing for them.

# k episodes that ended
"""

from collections.abc import Mapping, Sequence

import numpy as np
import structlog

from cormorant_contract.info import EpisodeMetric
from cormorant_worker.collect.block import Block
from cormorant_worker.collect.runs import Carry
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
        self._open = [Carry(num_envs, start=-np.inf if each.reduce == "max" else 0.0) for each in self._metrics]
        self._is_warned: set[str] = set()

    def of(self, block: Block, rows: Array, columns: Array, *, lengths: Array) -> dict[str, list[float]]:
        """The metrics by name of the episodes of `lengths` [k] frames whose last ones are these of a complete block."""
        found = {}
        for metric, leaf, so_far in zip(self._metrics, self._leaves, self._open, strict=True):
            info = block.info[leaf][: block.num_rows]
            if metric.reduce == "last":
                values = info[rows, columns].astype(np.float64)
            else:
                fold = _FOLDS[metric.reduce]
                gathered = block.runs.fold(fold, np.abs(info, dtype=np.float64) if metric.reduce == "any" else info)
                gathered = so_far.gather(block.runs, gathered, fold)
                values = _finished(metric, gathered[block.runs.at(rows, columns)], lengths)
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
        return {
            f"metric.{metric.name}": so_far.of(ids) for metric, so_far in zip(self._metrics, self._open, strict=True)
        }

    def restore(self, state: Mapping[str, Array], ids: Array) -> None:
        """Go on from `state()`, in the trajectories `ids`. What it knows nothing of is NaN until the open episodes
        end.
        """
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
