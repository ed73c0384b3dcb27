"""Count, mean and squared deviations of arrays, in float64, merged by Chan's update.

    n = a.n + b.n    mean = a.mean + d * b.n / n    m2 = a.m2 + b.m2 + d^2 * a.n * b.n / n    with d = b.mean - a.mean

`Statistics` are those of one version: by name of the batch key that they normalize, `observation`, `observation/pos`,
`next/reward`. As plain data they travel to learners, into files and into states:

    {"observation": {"count": 4096, "mean": [...], "m2": [...], "clip": 10.0}, "next/reward": {...}}

`cormorant_postproc.normalized` computes the same from this data, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cormorant_worker.errors import StateError
from cormorant_worker.spaces import Array

EPSILON = 1e-8
"""Added to the variance, as gymnasium and Stable-Baselines3 do."""
REWARD = "next/reward"
"""Key whose moments are those of the discounted return."""

Document = Mapping[str, Mapping[str, Any]]
"""Statistics as plain data."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningMoments:
    """Count, mean and sum of squared deviations of arrays of one shape."""

    count: int
    mean: Array
    """float64, with the shape of one array."""
    m2: Array
    """float64: sums of squared deviations from the mean."""
    clip: float = 0.0
    """Bound of normalized values; 0: none."""

    @classmethod
    def none(cls, shape: tuple[int, ...], *, clip: float = 0.0) -> "RunningMoments":
        return cls(0, np.zeros(shape), np.zeros(shape), clip)

    @classmethod
    def of(cls, values: Array, *, clip: float = 0.0) -> "RunningMoments":
        """Moments of `values` [N, ...], in two passes."""
        count = len(values)
        if not count:
            return cls.none(values.shape[1:], clip=clip)
        mean = values.mean(axis=0, dtype=np.float64)
        deviations = np.subtract(values, mean, dtype=np.float64)
        # What rounding left in the mean is taken out of it.
        rest = deviations.sum(axis=0) / count
        m2 = np.einsum("n...,n...->...", deviations, deviations) - count * rest * rest
        return cls(count, np.asarray(mean + rest), np.maximum(m2, 0.0), clip)

    def merged(self, other: "RunningMoments") -> "RunningMoments":
        """Moments of both sets of arrays, by Chan's parallel update."""
        if not self.count or not other.count:
            one = self if self.count else other
            return RunningMoments(one.count, one.mean, one.m2, self.clip)
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        m2 = self.m2 + other.m2 + apart * apart * (self.count * other.count / count)
        return RunningMoments(count, mean, m2, self.clip)

    @property
    def std(self) -> Array:
        """Divisor of deviations from the mean; 1 before there are two arrays."""
        return np.ones_like(self.m2) if self.count < 2 else np.sqrt(self.m2 / self.count + EPSILON)

    @property
    def center(self) -> Array:
        """Subtrahend; 0 before there are two arrays."""
        return np.zeros_like(self.mean) if self.count < 2 else self.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsGlance:
    frames: int
    """Acknowledged."""
    published_frames: int
    """Frames in the statistics that the newest version acts with."""
    mean: tuple[float, float]
    """Lowest and highest value over the elements of the key."""
    std: tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Moments by the name of the batch key that they normalize."""

    moments: Mapping[str, RunningMoments] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return max((moments.count for moments in self.moments.values()), default=0)

    def emptied(self) -> "Statistics":
        """Statistics of no frames, with the same keys, shapes and bounds."""
        return Statistics({name: RunningMoments.none(m.mean.shape, clip=m.clip) for name, m in self.moments.items()})

    def merged(self, other: "Statistics") -> "Statistics":
        found = dict(self.moments)
        for name, moments in other.moments.items():
            found[name] = found[name].merged(moments) if name in found else moments
        return Statistics(found)

    def document(self) -> dict[str, dict[str, Any]]:
        """The moments as plain data, exactly: floats round-trip through JSON."""
        return {
            name: {"count": m.count, "mean": m.mean.tolist(), "m2": m.m2.tolist(), "clip": m.clip}
            for name, m in self.moments.items()
        }

    @classmethod
    def of_document(cls, document: Any) -> "Statistics":
        try:
            return cls({name: _moments(found) for name, found in document.items()})
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise StateError(
                f"these are not normalization statistics: {error!r}; each entry needs count, mean, m2 and clip"
            ) from error


def _moments(found: Mapping[str, Any]) -> RunningMoments:
    mean, m2 = np.asarray(found["mean"], dtype=np.float64), np.asarray(found["m2"], dtype=np.float64)
    if mean.shape != m2.shape or not (np.isfinite(mean).all() and np.isfinite(m2).all() and (m2 >= 0).all()):
        raise ValueError(f"mean {list(mean.shape)} and m2 {list(m2.shape)} do not fit, or are not numbers")
    return RunningMoments(int(found["count"]), mean, m2, float(found["clip"]))
