"""Normalization statistics: count, mean and squared deviations of arrays, in float64, merged by Chan's update.

    n = a.n + b.n    mean = a.mean + d * b.n / n    m2 = a.m2 + b.m2 + d^2 * a.n * b.n / n    with d = b.mean - a.mean

`Statistics` are those of one version: by name of the batch key that they normalize, `observation`, `observation/pos`,
`next/reward`. As plain data they travel to learners, into files and into states:

    {"observation": {"count": 4096, "mean": [...], "m2": [...], "clip": 10.0}, "next/reward": {...}}

`cormorant_postproc.normalized` computes the same from this data, bit for bit.

A job has a `StatisticsBook`:

    a batch is acknowledged --merge--> current --stamp--> a version's, which never change
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cormorant_worker.errors import StateError
from cormorant_worker.spaces import Array

EPSILON = 1e-8
"""Added to the variance, as gymnasium and Stable-Baselines3 do."""
REWARD = "next/reward"
"""Key whose moments are those of the discounted return."""
KEPT_VERSIONS = 256
"""Number of newest versions whose statistics are kept."""

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
        both = dict(self.moments)
        for name, moments in other.moments.items():
            both[name] = both[name].merged(moments) if name in both else moments
        return Statistics(both)

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


class StatisticsBook(Mapping[int, Document]):
    """The statistics of one job; as a mapping, those of each published version, as plain data, never to be changed.
    Owned by a fleet, or by a collector without one. Methods may be called from any thread.
    """

    def __init__(self, found: Statistics | None = None) -> None:
        """`found`: what earlier fleets of the job merged; None: nothing, or what `begin` gives."""
        self._lock = threading.Lock()
        """Guards everything below: merging takes microseconds."""
        self.current = found or Statistics()
        """Moments of all acknowledged batches."""
        self._is_first = found is None
        self._versions: OrderedDict[int, Statistics] = OrderedDict()

    def begin(self, initial: Statistics) -> None:
        """Continue the statistics of the initial weights, those of version 0. Only the first worker's report counts."""
        with self._lock:
            self._versions.setdefault(0, initial)
            self._base(initial)
            # Every key has statistics from the start, for what is published before a batch is acknowledged.
            self.current = initial.emptied().merged(self.current)

    def inherit(self, statistics: Statistics) -> None:
        """Continue from the statistics that an earlier fleet published, once: not where this book began with some."""
        with self._lock:
            self._base(statistics)

    def _base(self, statistics: Statistics) -> None:
        if self._is_first and statistics.count:
            self.current, self._is_first = statistics.merged(self.current), False

    def merge(self, statistics: Statistics) -> None:
        with self._lock:
            self.current = self.current.merged(statistics)

    def stamp(self, version: int, statistics: Statistics | None = None) -> Statistics:
        """Record a published version's statistics: the given ones, else those that it has, else the current ones."""
        with self._lock:
            found = self._versions[version] = statistics or self._versions.get(version) or self.current
            while len(self._versions) > KEPT_VERSIONS:
                self._versions.popitem(last=False)
            return found

    def reset(self, current: Statistics, versions: Mapping[int, Statistics]) -> None:
        """Continue from a saved state. Statistics of published versions are kept."""
        with self._lock:
            self.current, self._is_first = current, False
            known = {**versions, **self._versions}
            self._versions = OrderedDict((v, known[v]) for v in sorted(v for v in known if v >= 0)[-KEPT_VERSIONS:])

    def glance(self) -> dict[str, StatisticsGlance]:
        """Summary of the current statistics by key, and of those of the newest version."""
        with self._lock:
            current, published = self.current.moments, next(reversed(self._versions.values()), Statistics()).moments
        return {
            name: StatisticsGlance(
                frames=moments.count,
                published_frames=published[name].count if name in published else 0,
                mean=(float(moments.mean.min()), float(moments.mean.max())),
                std=(float(moments.std.min()), float(moments.std.max())),
            )
            for name, moments in current.items()
            if moments.mean.size
        }

    def versions(self) -> dict[int, Statistics]:
        with self._lock:
            return dict(self._versions)

    def between(self, oldest: int, newest: int) -> dict[int, Document]:
        """Statistics of the versions from `oldest` to `newest`; of the newest version if none of these is known,
        because random actions have no version.
        """
        with self._lock:
            known = list(self._versions)
            wanted = [version for version in known if oldest <= version <= newest] or known[-1:]
            return {version: self._versions[version].document() for version in wanted}

    def __getitem__(self, version: int) -> Document:
        with self._lock:
            return self._versions[version].document()

    def __iter__(self) -> Iterator[int]:
        return iter(self.versions())

    def __len__(self) -> int:
        return len(self._versions)
