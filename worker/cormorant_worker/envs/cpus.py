"""How many processors this process may use (affinity and cgroup quota, which EnvPool's own default ignores), and two
threads that wait for each other in turn: faster on one CPU than on two, as long as they have it to themselves.

A pool with one thread and the thread that acts never work at the same time for long. Yet the kernel wakes each on
another CPU than that of its waker, which costs a cheap vector step a third of its time (decision 0042).
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, thread_time_ns
from types import TracebackType

import structlog

_QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def available_cpus() -> int:
    """Whole processors within this process's CPU limit, at least 1."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        allowed = os.cpu_count() or 1
    quota = 0.0
    with suppress(OSError, ValueError):  # an unreadable limit is no limit
        if _QUOTA_V2.exists():
            limit, period = _QUOTA_V2.read_text().split()
            quota = 0.0 if limit == "max" else int(limit) / int(period)
        elif _QUOTA_V1.exists() and (limit_us := int(_QUOTA_V1.read_text())) > 0:
            quota = limit_us / int(_PERIOD_V1.read_text())
    return max(1, min(allowed, int(quota))) if quota else allowed


log = structlog.get_logger()

_WINDOW_S = 0.2
"""Of stepping, after which it is judged whether others want the CPU."""
_ALONE = 0.75
"""Share of a window for which one of the two threads was on the CPU: less, and it is left."""
_REST_S = 10.0
"""Without a CPU of their own, before the next try."""

_TASKS = Path("/proc/self/task")


def native_threads() -> frozenset[int]:
    """Ids of this process's threads; empty where the system does not list them."""
    try:
        return frozenset(int(task.name) for task in _TASKS.iterdir())
    except OSError:
        return frozenset()


class OneCpu:
    """Entered by the acting thread while it fills a batch: pins it and a pool's threads to its current CPU."""

    def __init__(self, threads: frozenset[int] = frozenset(), clock_s: Callable[[], float] = monotonic) -> None:
        """Pin threads, the pool's by their native ids, from the first batch on; none: nothing is pinned."""
        self._threads, self._clock_s = threads, clock_s
        self.cpu: int | None = None
        """The CPU that the threads keep to; None: they are free."""
        self._before: set[int] = set()
        """CPUs that the acting thread may use outside a batch."""
        self._wall_s = self._began_s = self._free_until_s = 0.0
        self._acting_ns = self._began_ns = self._pool_ns = 0

    def __enter__(self) -> None:
        now_s = self._clock_s()
        if not self._threads or now_s < self._free_until_s:
            return
        try:
            self._before = os.sched_getaffinity(0)
            if self.cpu is None:
                self._threads &= native_threads()  # some of them only built the environments
                self.cpu = int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
                for thread in self._threads:
                    os.sched_setaffinity(thread, {self.cpu})
                self._wall_s, self._acting_ns, self._pool_ns = 0.0, 0, self._on_cpu_ns()
            os.sched_setaffinity(0, {self.cpu})
        except OSError as error:  # no /proc, or no right to choose
            self._give_up(error)
        self._began_s, self._began_ns = now_s, thread_time_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cpu is None:
            return
        try:
            # What the acting thread starts between batches would inherit its CPU.
            os.sched_setaffinity(0, self._before)
            self._wall_s += self._clock_s() - self._began_s
            self._acting_ns += thread_time_ns() - self._began_ns
            if self._wall_s >= _WINDOW_S:
                pool_ns = self._on_cpu_ns()
                self.judge(self._wall_s, (self._acting_ns + pool_ns - self._pool_ns) / 1e9)
                self._wall_s, self._acting_ns, self._pool_ns = 0.0, 0, pool_ns
        except OSError as failure:
            self._give_up(failure)

    def judge(self, wall_s: float, cpu_s: float) -> None:
        """Unpin the threads if other processes contend for the CPU: of a window of `wall_s`, one of the threads was on
        the CPU for `cpu_s`.
        """
        if cpu_s < _ALONE * wall_s:
            self._free_until_s = self._clock_s() + _REST_S
            self._release()

    def _release(self) -> None:
        for thread in self._threads:
            os.sched_setaffinity(thread, self._before)
        self.cpu = None

    def _on_cpu_ns(self) -> int:
        """Nanoseconds that the pool's threads spent on a CPU so far."""
        return sum(int((_TASKS / str(thread) / "schedstat").read_text().split()[0]) for thread in self._threads)

    def _give_up(self, error: OSError) -> None:
        log.debug("cpu_not_kept", error=str(error))
        self._threads &= native_threads()
        with suppress(OSError):
            self._release()
        self._threads, self.cpu = frozenset(), None
