"""Reads workers' heartbeats, for the counters and to find workers that make no progress."""

import math
from collections import deque

from cormorant_contract.job import CollectorJob
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.slot import WorkerHandle
from cormorant_worker.fleet.stats import FleetCounters
from cormorant_worker.worker.heartbeat import Phase
from cormorant_worker.worker.messages import PlainCommand, Restore

_HANG_FLOOR_S = 120.0
_HANG_MARGIN_S = 30.0
_STORE_S = 600.0
"""To write a batch to a dataset, to close it, and to save or restore a state, where the hang limit is not higher."""
_SWEEP_S = 1.0
"""In which each heartbeat is read once: a turn reads a few."""
_MOST_READ = 1000
"""In one turn."""
_MANY_SIGNS = 20
"""Heartbeats of an inference server after which its own history says how long it may be silent, about one a second."""
_SOONEST_S = 15.0
_TIMES_LONGER = 10
_LONGEST_TURN_S = 1.0
"""Counted as silence of a worker. What is more was ours: this process was stopped, or had no processor."""


class HangDetector:
    """Checks all workers, a few at a time. Guarded by the fleet's condition."""

    def __init__(self, job: CollectorJob, options: FleetOptions, counters: FleetCounters) -> None:
        self.lived_s = 0.0
        """The fleet's time: that in which its thread turned. What happened while it did not is no worker's fault."""
        self._options, self._counters = options, counters
        limit_s = job.spec.env.block.longest_step_s + _HANG_MARGIN_S
        self._hang_limit_s = options.hang_timeout_s or max(_HANG_FLOOR_S, limit_s)
        self._store_limit_s = max(self._hang_limit_s, _STORE_S)
        self._round: deque[WorkerHandle] = deque()
        """The worker whose heartbeat was not read for longest comes first. Those that are gone are dropped then."""
        self._turned_at = 0.0

    def add(self, handle: WorkerHandle) -> None:
        self._round.append(handle)

    def turn(self, now: float, *, is_paused: bool) -> list[tuple[WorkerHandle, float, float]]:
        """Read the heartbeats that are due. Returns workers without a sign of life though one is expected (they hold a
        ticket and are not paused, or are asked something), their seconds without it, and limits.
        """
        passed = min(max(0.0, now - self._turned_at), _LONGEST_TURN_S)
        self._turned_at = now
        self.lived_s += passed
        hung = []
        for handle in self.sweep(min(_MOST_READ, math.ceil(len(self._round) * passed / _SWEEP_S))):
            if self._options.waits_for_places and not handle.connection.pid:
                handle.last_progress = self.lived_s  # it has no machine to run on
                continue
            # A server counts its turns in place of frames, and turns though it has nothing to do. A worker that waits
            # for a server looks up twice a second, which ends a stretch of its time.
            phase = handle.connection.phase
            spent_ns = handle.connection.spent_ns if phase is Phase.ASKING else ()
            heartbeat = handle.connection.frames, phase, spent_ns
            rests = is_paused or (phase is Phase.WAITING and not handle.tickets)
            rests = rests and not handle.slot.is_server and handle.is_ready and not handle.unanswered
            has_changed = heartbeat != handle.last_heartbeat
            if handle.is_ready and has_changed:
                handle.signs += 1
                handle.longest_silence_s = max(handle.longest_silence_s, self.lived_s - handle.last_progress)
            if has_changed or rests:
                handle.last_heartbeat, handle.last_progress = heartbeat, self.lived_s
            silent_s, limit_s = self.lived_s - handle.last_progress, self._limit_of(handle)
            if silent_s > limit_s:
                hung.append((handle, silent_s, limit_s))
        return hung

    def sweep(self, most: int) -> list[WorkerHandle]:
        """Update counters from the heartbeats of some workers. Returns these workers."""
        read = []
        for _ in range(min(most, len(self._round))):
            handle = self._round.popleft()
            if not handle.is_gone:
                self._round.append(handle)
                self._counters.follow(handle)
                read.append(handle)
        return read

    def _limit_of(self, handle: WorkerHandle) -> float:
        if not handle.is_ready or handle.connection.phase is Phase.BUILDING:
            return self._options.startup_timeout_s
        if handle.slot.is_server and handle.signs >= _MANY_SIGNS:
            # A server turns several times a second, but for its acts, of which the longest has been seen.
            return min(self._hang_limit_s, max(_SOONEST_S, _TIMES_LONGER * handle.longest_silence_s))
        # It writes or reads what may be on another machine, or is asked for all that it holds.
        asked = (question.command for question in handle.unanswered.values())
        is_storing = any(
            isinstance(command, Restore) or command in (PlainCommand.SAVE, PlainCommand.READ_CACHED)
            for command in asked
        )
        is_storing = is_storing or handle.connection.phase is Phase.STORING
        return self._store_limit_s if is_storing else self._hang_limit_s
