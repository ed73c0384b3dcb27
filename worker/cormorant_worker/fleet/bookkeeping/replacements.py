"""Whether a worker that is gone is replaced, and when: at once, after a while, or not any more."""

import math
from collections.abc import Collection

from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import WorkerFailed
from cormorant_worker.fleet.bookkeeping.scheduler import Slot
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.fleet.options import FleetOptions

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_POD_ENDS_S = 10.0
"""A misplaced worker's pod has ended by then: the next worker is not placed there, too."""


class Replacements:
    """Failures by slot. Guarded by the fleet's condition."""

    def __init__(self, job: CollectorJob, options: FleetOptions) -> None:
        self.count = 0
        """Workers that were replaced."""
        self.misplaced = ""
        """Why the last misplaced worker could not run; empty: there was none."""
        self._limit = job.spec.run_policy.max_restarts_per_slot
        self._options = options
        self._failures: dict[Slot, int] = {}
        """In a row."""
        self._not_before: dict[Slot, float] = {}

    def plan(self, handle: WorkerHandle, reason: str, *, now: float) -> None:
        """A worker is gone, and will be replaced."""
        self.count += 1
        slot = handle.slot
        if handle.is_misplaced:
            self.misplaced = f"worker {handle.name} {reason}"
            self._not_before[slot] = now + _POD_ENDS_S
            return
        was_healthy = (handle.landed_frames > 0 or handle.is_server) and now - handle.started >= self._options.healthy_s
        failures = self._failures[slot] = 1 if was_healthy else self._failures.get(slot, 0) + 1
        if failures > self._limit:
            # A script has no manifest whose field it could change.
            field = "max_restarts" if self._options.overrides else "spec.runPolicy.maxRestartsPerSlot"
            healthy_s = self._options.healthy_s
            between = f", and never lived {healthy_s:g} s in between" if math.isfinite(healthy_s) else ""
            often = "once" if self._limit == 1 else f"{self._limit} times"
            raise WorkerFailed(f"worker {handle.name} {reason}; it was restarted {often} already ({field}){between}")
        backoff = 0.0 if failures == 1 else min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (failures - 1))
        self._not_before[slot] = now + backoff

    def due(self, vacant: Collection[Slot], now: float) -> list[Slot]:
        """Those of these slots whose replacements need not wait any more, in order."""
        return sorted(slot for slot in vacant if now >= self._not_before.get(slot, 0.0))

    def forget(self, slot: Slot) -> None:
        """A slot is filled, or given up: its next worker need not wait."""
        self._not_before.pop(slot, None)
