"""Looks at workers' pulses: for the books, and to find those that make no progress."""

import math
from collections import deque
from collections.abc import Callable, Mapping

from cormorant_contract.job import CollectorJob
from cormorant_worker.fleet.counters import FleetCounters
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.scheduler import Slot
from cormorant_worker.fleet.worker_handle import WorkerHandle
from cormorant_worker.worker.heartbeat import Phase

_SWEEP_S = 1.0
"""In which every worker is looked at once: a turn looks at a few."""
_MOST_LOOKS = 1000
"""In one turn."""
_LONGEST_TURN_S = 1.0
"""Counted as silence of a worker. What is more was ours: this process was stopped, or had no processor."""


class HangDetector:
    """Goes round all members, a few at a time. Guarded by the fleet's condition."""

    def __init__(
        self,
        job: CollectorJob,
        options: FleetOptions,
        members: Mapping[Slot, WorkerHandle],
        tally: FleetCounters,
        *,
        on_hung: Callable[[WorkerHandle, float, float], None],
    ) -> None:
        """Begin.

        Args:
            job: for limits, as the options are.
            options: the fleet's.
            members: those who live.
            tally: takes over what the pulses say.
            on_hung: told of a worker that makes no progress, for how many seconds, and how many it may.
        """
        self.lived_s = 0.0
        """The fleet's time: that in which its thread turned. What happened while it did not is no worker's fault."""
        self._options, self._members, self._tally = options, members, tally
        self._on_hung = on_hung
        self._hang_limit_s = options.hang_limit_s(job)
        self._store_limit_s = max(self._hang_limit_s, options.store_timeout_s)
        self._round: deque[Slot] = deque()
        """Who was not looked at for longest comes first."""
        self._watched_at = 0.0

    def add(self, slot: Slot) -> None:
        self._round.append(slot)

    def remove(self, slot: Slot) -> None:
        """It is a member no more."""
        self._round.remove(slot)

    def turn(self, now: float, *, is_paused: bool) -> None:
        """Look at as many as are due."""
        passed = min(max(0.0, now - self._watched_at), _LONGEST_TURN_S)
        self._watched_at = now
        self.lived_s += passed
        for member in self.sweep(min(_MOST_LOOKS, math.ceil(len(self._round) * passed / _SWEEP_S))):
            self._check(member, is_paused=is_paused)

    def sweep(self, most: int) -> list[WorkerHandle]:
        """Take over what the pulses of some say. Returns them."""
        found = []
        for _ in range(min(most, len(self._round))):
            slot = self._round[0]
            self._round.rotate(-1)
            self._tally.follow(self._members[slot])
            found.append(self._members[slot])
        return found

    def _check(self, member: WorkerHandle, *, is_paused: bool) -> None:
        if self._options.waits_for_places and not member.link.pid:
            member.last_progress = self.lived_s
            return
        if not member.is_ready or member.link.phase is Phase.BUILDING:
            limit = self._options.startup_timeout_s
        else:
            limit = self._store_limit_s if member.is_storing else self._hang_limit_s
        if (silent := member.silent_for_s(self.lived_s, is_paused=is_paused)) > limit:
            self._on_hung(member, silent, limit)
