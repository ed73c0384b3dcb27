"""Environments that workers restarted: what the next worker of a slot inherits, and whether some keep failing."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from cormorant_contract.job import CollectorJob
from cormorant_worker.envs.restarts import RESTART_WINDOW_S
from cormorant_worker.fleet.bookkeeping.scheduler import Slot

_SHARE = 10
"""An environment keeps failing where one worker has restarted environments this fraction of its limit."""
_MOST_CHARACTERS = 4000


class EnvFailures:
    """By slot. Guarded by the fleet's condition."""

    def __init__(self, job: CollectorJob, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        block = job.spec.env.gymnasium
        self._many = max(1, (block.max_restarts if block is not None else 0) // _SHARE)
        self._recent: defaultdict[Slot, deque[float]] = defaultdict(deque)
        self._first = ""

    def note(self, slot: Slot, worker: str, fields: Mapping[str, Any]) -> None:
        """A worker restarted an environment. `fields`: of its log line."""
        self._recent[slot].append(self._clock())
        if not self._first:
            cause = f"environment {fields.get('env')} of worker {worker} {fields.get('reason')}"
            self._first = f"{cause}\n{fields.get('exception', '')}".strip()[:_MOST_CHARACTERS]

    def recent(self, slot: Slot) -> int:
        """Environments of a slot that were restarted within RESTART_WINDOW_S."""
        if slot not in self._recent:
            return 0
        recent, now = self._recent[slot], self._clock()
        while recent and now - recent[0] >= RESTART_WINDOW_S:
            recent.popleft()
        return len(recent)

    @property
    def sentence(self) -> str:
        """That environments keep failing, with the first failure and its traceback; empty: they do not. The same
        sentence for as long as it lasts.
        """
        if all(self.recent(slot) < self._many for slot in self._recent):
            return ""
        return f"environments keep failing and are restarted; the first: {self._first}"
