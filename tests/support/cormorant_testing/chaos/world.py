"""Shared by schedules over REST and in this process: failures of workers, control calls with a time limit, and a small
disk of the world's own, which fills up and is freed.
"""

import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from cormorant_testing.chaos.judge import Finding, Judge
from cormorant_testing.chaos.plan import Plan
from cormorant_testing.scripts import Repeated

CALM_S = {"local": 150.0, "ray": 300.0}
"""By engine: a worker that was frozen while it was built is found out after STARTUP_S."""
CONTROL_S = 4.0
HANG_S = 6.0
STARTUP_S = {"local": 90.0, "ray": 240.0}
"""By engine. Torch has to be imported first, on a busy machine, and on Ray by every worker."""


class World:
    """Something that collects, and what happens to it. A step of the schedule is a method of its name; subclasses have
    those that are not here, and `check`, which raises what went wrong beside the schedule.
    """

    refusals: tuple[type[Exception], ...] = ()
    """Raised by steps, and no finding: a worker is frozen, or was killed while it was asked."""

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
        """Do everything that the schedule says, and what brings calm after it."""
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

    def _until(self, what: str, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + self._calm_s
        while not holds():
            self.check()
            if time.monotonic() > deadline:
                raise Finding(f"not within {self._calm_s:.0f} s: {what}")
            time.sleep(0.2)

    def _burst(self, amount: float) -> None:
        for _ in range(100 + int(200 * amount)):
            self._publish(amount)
            self.check()

    def _kill(self, amount: float) -> None:
        self._signal(signal.SIGKILL, amount)

    def _freeze(self, amount: float) -> None:
        if (pid := self._signal(signal.SIGSTOP, amount)) is not None:
            self._frozen.add(pid)

    def _thaw(self, amount: float = 0.0) -> None:
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


T = TypeVar("T")
LIMIT_S = 40.0
"""For one control call: far more than its own limits, on a busy machine."""


def within(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """Call something in a thread of its own. Raises Finding where it does not return in time."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # the thread's edge: raised below
            future.set_exception(error)

    # Not an executor's, which the interpreter would wait for at its end.
    threading.Thread(target=run, name=f"call: {what}", daemon=True).start()
    if not wait([future], limit_s).done:
        faulthandler.dump_traceback()
        raise Finding(f"{what} did not return within {limit_s:.0f} s")
    return future.result()


class Watch(Repeated):
    """Calls something again and again until it is closed; keeps what went wrong first."""

    def __init__(self, what: str, call: Callable[[], object]) -> None:
        super().__init__(self._look, every_s=0.5)
        self._what, self._watched = what, call
        self._error: BaseException | None = None

    def _look(self) -> None:
        try:
            if self._error is None:
                within(LIMIT_S, self._what, self._watched)
        except BaseException as error:  # noqa: BLE001  # the thread's edge: raised by `check`
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class SmallDisk:
    """A file system of 32 MiB in memory, mounted on `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ballast = folder, folder / "ballast"
        self.is_there = _did("mount", "-t", "tmpfs", "-o", "size=32m", "chaos", str(folder))
        """False: this process may not mount one."""

    def fill(self) -> None:
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(b"\1" * size):
                        pass

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_there:
            _did("umount", "--lazy", str(self._folder))


def _did(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
