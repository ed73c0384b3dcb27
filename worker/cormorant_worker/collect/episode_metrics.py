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
        self.last_leaves = tuple(
            leaf for metric, leaf in zip(metrics, self._leaves, strict=True) if metric.reduce == "last"
        )
        """Positions of the leaves whose last values `close` wants."""
        self._has_folds = len(self.last_leaves) < len(metrics)
        self._first: Array = np.array([-np.inf if metric.reduce == "max" else 0.0 for metric in metrics])
        """[M] what an episode begins with."""
        self._kept: Array = np.zeros((num_envs, len(metrics)))
        """[B, M] float64. Unused where a metric is the last value."""
        self._closed: list[tuple[Array, Arrays, Array]] = []
        """[k, M] kept, [k] each of last_leaves, [k] lengths: of episodes that ended since `take`."""
        self._is_warned: set[str] = set()
        self.open(slice(None))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(metric.name for metric in self._metrics)

    def folds(self, columns: slice) -> tuple[Fold, ...]:
        """What the owner of these columns calls at every step: `fold(kept, values, out=kept)`."""
        return tuple(
            (_FOLDS[metric.reduce], self._kept[columns, i], leaf)
            for i, (metric, leaf) in enumerate(zip(self._metrics, self._leaves, strict=True))
            if metric.reduce != "last"
        )

    def open(self, columns: slice | Array) -> None:
        """New episodes begin in these columns."""
        if self._has_folds:
            self._kept[columns] = self._first

    def close(self, columns: Array, *, last: Arrays, lengths: Array) -> None:
        """The episodes of these columns end. `open` comes next.

        Args:
            columns: [k] of B.
            last: [k] each of `last_leaves`, of their last steps.
            lengths: [k] frames.
        """
        if self._metrics:
            self._closed.append((self._kept.take(columns, axis=0), last, lengths))

    def take(self) -> dict[str, list[float]]:
        """The metrics of the episodes that ended since the last call, by name, in the order in which they ended."""
        if not self._closed:
            return {}
        closed, self._closed = self._closed, []
        kept = np.concatenate([each for each, _, _ in closed]).T
        last = iter([np.concatenate(values) for values in zip(*(each for _, each, _ in closed), strict=True)])
        lengths = np.concatenate([each for _, _, each in closed])
        found = {}
        for metric, values in zip(self._metrics, kept, strict=True):
            match metric.reduce:
                case "last":
                    reduced = next(last).astype(np.float64)
                case "mean":
                    reduced = values / lengths
                case "any":
                    reduced = np.sign(values)
                case _:
                    reduced = values
            found[metric.name] = reduced.tolist()
            self._warn(metric, reduced)
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

    def state(self) -> dict[str, Array]:
        """What the open episodes have gathered, by name."""
        return {f"metric.{name}": kept.copy() for name, kept in zip(self.names, self._kept.T, strict=True)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from `state()`. What it knows nothing of is NaN until the open episodes end."""
        for name, kept in zip(self.names, self._kept.T, strict=True):
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
