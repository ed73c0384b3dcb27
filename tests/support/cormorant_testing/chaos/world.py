"""A schedule on either door: what happens to workers, whoever asks them."""

import os
import signal
import time
from contextlib import suppress
from typing import Any

from cormorant_testing.chaos.disk import SmallDisk
from cormorant_testing.chaos.judge import Judge
from cormorant_testing.chaos.plan import Plan

CALM_S = {"local": 150.0, "ray": 300.0}
"""By engine: a worker that was frozen while it was built is found out after STARTUP_S."""
CONTROL_S = 4.0
HANG_S = 6.0
STARTUP_S = {"local": 90.0, "ray": 240.0}
"""By engine. Torch has to be imported first, on a busy machine, and on Ray by every worker."""


class World:
    """Something that collects, and what happens to it. A step of the schedule is a method of its name."""

    refusals: tuple[type[Exception], ...] = ()
    """Raised by steps, and no finding: a worker is frozen, or was killed while it was asked."""
    # What each door does its own way: `check` raises what went wrong beside the schedule.
    check: Any
    _begin: Any
    _calm: Any
    _end: Any
    _pids: Any
    _publish: Any

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._calm_s = CALM_S[plan.engine]
        self.judge = Judge(resets=plan.resets, may_miss=plan.may_miss)
        self._version = 0
        self._saved = b""
        self._frozen: set[int] = set()
        self._seeds = 5000
        self._disk: SmallDisk | None = None
        self._is_full = False

    def run(self) -> None:
        """Everything that the schedule says, and the calm after it.

        Raises:
            Finding: something that must never happen did.
        """
        self._begin()
        for step in self._plan.steps:
            time.sleep(step.after_s)
            self.check()
            if step.what == "fill disk" and (self._disk is None or not self._disk.is_there):
                continue
            with suppress(*self.refusals):
                getattr(self, f"_{step.what.replace(' ', '_')}")(step.amount)
        self._calm()
        self._end()

    def _burst(self, amount: float) -> None:
        for _ in range(100 + int(200 * amount)):
            self._publish(amount)
            self.check()

    def _kill(self, amount: float) -> None:
        self._signal(signal.SIGKILL, amount)

    def _freeze(self, amount: float) -> None:
        if (pid := self._signal(signal.SIGSTOP, amount)) is not None:
            self._frozen.add(pid)

    def _thaw(self, amount: float = 1.0) -> None:
        while self._frozen:
            with suppress(ProcessLookupError):
                os.kill(self._frozen.pop(), signal.SIGCONT)

    def _signal(self, number: int, amount: float) -> int | None:
        pids = self._pids()
        if not pids:
            return None
        pid = pids[int(amount * len(pids))]
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid
