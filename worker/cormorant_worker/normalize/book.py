"""The statistics of one job, merged from acknowledged batches, and those of each published version.

    a batch is acknowledged --merge--> current --stamp--> a version's, which never change

Guarded by its own lock: merging takes microseconds.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from cormorant_worker.normalize.moments import Document, Statistics, StatisticsGlance

KEPT_VERSIONS = 256
"""Number of newest versions whose statistics are kept."""


class StatisticsBook(Mapping[int, Document]):
    """Statistics by policy version, as plain data, which must not be changed. Owned by a fleet, or by a collector
    without a fleet. Methods may be called from any thread.
    """

    def __init__(self, found: Statistics | None = None) -> None:
        """Begin with what earlier fleets of the job merged; None: nothing, or what `begin` gives."""
        self._lock = threading.Lock()
        """Guards everything below."""
        self.current = found or Statistics()
        """Moments of all acknowledged batches."""
        self._is_first = found is None
        self._versions: OrderedDict[int, Statistics] = OrderedDict()

    def begin(self, initial: Statistics) -> None:
        """Set the statistics of version 0: none, or those of the initial weights, which are then continued. All workers
        report the same; the first report counts.
        """
        with self._lock:
            self._versions.setdefault(0, initial)
            self._base(initial)
            # Every key has statistics from the start, for what is published before a batch is acknowledged.
            self.current = initial.emptied().merged(self.current)

    def inherit(self, statistics: Statistics) -> None:
        """Continue from the statistics that an earlier fleet published, unless this one has merged more frames."""
        with self._lock:
            self._base(statistics)

    def _base(self, statistics: Statistics) -> None:
        if self._is_first and statistics.count:
            self.current, self._is_first = statistics.merged(self.current), False

    def merge(self, statistics: Statistics) -> None:
        """Merge a batch. Called once per batch."""
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
