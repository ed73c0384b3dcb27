"""Desired group sizes, applied to the fleet by one thread because starting workers takes a while."""

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice

import structlog

from cormorant_api.errors import ApiError
from cormorant_contract.rest.control import DesiredReport
from cormorant_contract.rest.problems import ProblemType
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.fleet import WorkerFleet

log = structlog.get_logger()


class GroupSizes:
    """The latest requested size of each group. Thread-safe."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        """Guards the fields below."""
        self.groups = {name: group.desired for name, group in fleet.stats(workers=False).groups.items()}
        self._empty: dict[str, tuple[int, ...]] = {}
        """Slots in which no worker is expected, by group; groups without such slots are left out."""
        self._exact: set[str] = set()
        """Groups that ever had such slots: the fleet gets their indices, because a size alone would keep a gap."""
        self._pending = 0
        """Requests not applied yet."""
        self._error = ""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="group-sizes")

    def want(self, groups: Mapping[str, int], *, empty_slots: Mapping[str, Collection[int]] | None = None) -> None:
        """Request sizes; other groups keep theirs. `empty_slots`: skipped indices; groups that are missing there skip
        none.
        """
        with self._lock:
            if unknown := sorted(set(groups) - set(self.groups)):
                raise ApiError(
                    ProblemType.INVALID_REQUEST,
                    f"unknown worker group {', '.join(unknown)}; the job has {', '.join(self.groups)}",
                    known=tuple(self.groups),
                )
            wanted = self.groups | dict(groups)
            if not any(wanted.values()):
                raise ApiError(ProblemType.LAST_WORKER, "no worker would be left; to pause the job, POST /v1/pauses")
            asked = {name: tuple(sorted(set(found))) for name, found in (empty_slots or {}).items() if found}
            self._empty = {name: found for name, found in self._empty.items() if name not in groups} | asked
            self._exact |= asked.keys()
            self.groups = wanted
            self._pending += 1
            self._pool.submit(self._resize)

    def describe(self, *, paused: bool) -> DesiredReport:
        """The report for the operator; `paused` is the current `spec.paused`."""
        with self._lock:
            return DesiredReport(
                groups=self.groups,
                paused=paused,
                pending=self._pending > 0,
                error=self._error,
                empty_slots=self._empty,
            )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _resize(self) -> None:
        with self._lock:
            groups: dict[str, int | Collection[int]] = dict(self.groups)
            for name in self._exact & self.groups.keys():
                # The lowest free indices: 2 workers and slot 0 empty are (1, 2).
                empty = set(self._empty.get(name, ()))
                groups[name] = tuple(islice((index for index in count() if index not in empty), self.groups[name]))
        error = ""
        try:
            self._fleet.resize(groups)  # no effect if an earlier request had the same sizes
        except Exception as failure:  # noqa: BLE001  # the thread's edge: a failed request is not repeated
            error = str(failure) if isinstance(failure, CormorantError) else f"{type(failure).__name__}: {failure}"
            log.warning("resize_failed", groups=groups, reason=error)
        with self._lock:
            self._error = error
            self._pending -= 1
