"""Samples for the plots of the live page: one per second for the last 15 minutes, and at most 1,200 for the whole
run.
"""

from collections import deque
from collections.abc import Mapping
from statistics import fmean, quantiles

from cormorant_contract.metrics.labels import ACTIVITIES
from cormorant_contract.rest.live import History, Sample
from cormorant_worker.fleet.stats import FleetStats

_FINE = 900
_COARSE = 1200
_FEWEST_FOR_A_BAND = 5


class Past:
    """Samples so far, and the next one from the fleet's counters. Not thread-safe; `sample` has one caller."""

    def __init__(self, *, fine: int = _FINE, coarse: int = _COARSE) -> None:
        """`fine`: number of newest samples to keep. `coarse`: most samples of the whole run, even; beyond it, every
        second one is dropped.
        """
        self._fine: deque[Sample] = deque(maxlen=fine)
        self._coarse: list[Sample] = []
        self._most_coarse = coarse
        self._stride, self._count = 1, 0
        self._spent: Mapping[str, float] | None = None

    def sample(self, stats: FleetStats, *, at: float, per_second: float) -> Sample:
        """The next sample, for `add`; `at` in seconds since 1970, `per_second` in frames."""
        returns, lengths = stats.recent_returns, stats.recent_lengths
        low = high = None
        if len(returns) >= _FEWEST_FOR_A_BAND:
            deciles = quantiles(returns, n=10, method="inclusive")
            low, high = deciles[0], deciles[-1]
        oldest = min((group.min_version for group in stats.groups.values()), default=stats.version)
        return Sample(
            at=round(at, 1),
            per_second=round(per_second, 1),
            mean_return=fmean(returns) if returns else None,
            return_low=low,
            return_high=high,
            mean_length=fmean(lengths) if lengths else None,
            staleness=max(0, stats.version - max(0, oldest)),
            time_shares=self._shares(stats),
        )

    def _shares(self, stats: FleetStats) -> dict[str, float]:
        """Share of each activity in the workers' time since the last sample; empty if no time passed."""
        spent = {name: sum(group.spent_s.get(name, 0.0) for group in stats.groups.values()) for name in ACTIVITIES}
        before, self._spent = self._spent, spent
        if before is None:
            return {}
        # The seconds of a replaced worker disappear from the sum.
        grown = {name: max(0.0, seconds - before[name]) for name, seconds in spent.items()}
        total = sum(grown.values())
        return {name: round(seconds / total, 4) for name, seconds in grown.items() if seconds} if total else {}

    def add(self, sample: Sample) -> None:
        self._fine.append(sample)
        if self._count % self._stride == 0:
            self._coarse.append(sample)
        self._count += 1
        if len(self._coarse) > self._most_coarse:
            self._coarse, self._stride = self._coarse[::2], 2 * self._stride

    def told(self) -> History:
        """The samples of the whole run, oldest first."""
        begin = self._fine[0].at if self._fine else 0.0
        samples = [sample for sample in self._coarse if sample.at < begin] + list(self._fine)
        columns = {name: tuple(getattr(sample, name) for sample in samples) for name in History.model_fields}
        return History.model_validate(columns)
