"""Numbers that a job reports of every episode beside its return and length, made of declared keys of info.

# M metrics, B environments, n columns of a group, k episodes that end
"""

from collections.abc import Mapping, Sequence

import numpy as np
import structlog

from cormorant_contract.info import EpisodeMetric
from cormorant_worker.errors import ManifestError
from cormorant_worker.spaces import Array, Arrays, Leaf

log = structlog.get_logger()

_FOLDS = {"sum": np.add, "mean": np.add, "max": np.maximum, "any": np.hypot}
"""How a step's values are added to the open episodes. NaN stays NaN in all of them, and hypot is 0 only where every
value was 0."""
Fold = tuple[np.ufunc, Array, int]
"""A fold, the [n] float64 that it is about, and the position of the leaf that it reads."""


class EpisodeMetrics:
    """What the open episodes of B environments have gathered. Owned by their `Trajectories`."""

    def __init__(self, metrics: Sequence[EpisodeMetric], info: Sequence[Leaf], num_envs: int) -> None:
        """Begin.

        Args:
            metrics: of the manifest.
            info: the leaves of a step's info.
            num_envs: B.

        Raises:
            ManifestError: a metric reads a key that is no single number, or is not there.
        """
        self._metrics = tuple(metrics)
        self._leaves = [_find(metric, info) for metric in metrics]
        self._kept: Array = np.empty((len(metrics), num_envs))
        """[M, B] float64. Unused where a metric is the last value."""
        self._is_warned: set[str] = set()
        self.open(slice(None))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(metric.name for metric in self._metrics)

    def folds(self, columns: slice) -> tuple[Fold, ...]:
        """What the owner of these columns calls at every step: `fold(kept, values, out=kept)`."""
        return tuple(
            (_FOLDS[metric.reduce], self._kept[i, columns], leaf)
            for i, (metric, leaf) in enumerate(zip(self._metrics, self._leaves, strict=True))
            if metric.reduce != "last"
        )

    def open(self, columns: slice | Array) -> None:
        """New episodes begin in these columns."""
        for i, metric in enumerate(self._metrics):
            self._kept[i, columns] = -np.inf if metric.reduce == "max" else 0.0

    def close(self, columns: Array, *, last: Arrays, lengths: Array) -> Mapping[str, list[float]]:
        """The metrics of k episodes that end, [k] a name.

        Args:
            columns: [k] of B.
            last: [k, ...] a leaf of info: of their last steps.
            lengths: [k] frames.
        """
        found: dict[str, list[float]] = {}
        for i, (metric, leaf) in enumerate(zip(self._metrics, self._leaves, strict=True)):
            values = last[leaf].astype(np.float64) if metric.reduce == "last" else self._kept[i, columns]
            if metric.reduce == "mean":
                values = values / lengths
            elif metric.reduce == "any":
                values = np.sign(values)
            found[metric.name] = values.tolist()
            if metric.name not in self._is_warned and not np.isfinite(values).all():
                self._is_warned.add(metric.name)
                log.warning(
                    "episode_metric_not_finite",
                    metric=metric.name,
                    value=float(values[~np.isfinite(values)][0]),
                    hint=f"a step had no {metric.key} in its info, or NaN; such episodes are left out of means. "
                    f"Declare a fill for {metric.key} in env.info to count such steps. Said once.",
                )
        return found

    def state(self) -> dict[str, Array]:
        """What the open episodes have gathered, by name."""
        return {f"metric.{name}": kept.copy() for name, kept in zip(self.names, self._kept, strict=True)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from `state()`. What it knows nothing of is NaN until the open episodes end."""
        for name, kept in zip(self.names, self._kept, strict=True):
            kept[:] = state.get(f"metric.{name}", np.nan)


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
