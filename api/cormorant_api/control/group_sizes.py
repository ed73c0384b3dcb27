"""Desired group sizes, as the operator asked for them."""

import threading
from collections.abc import Collection, Mapping
from itertools import count, islice

import structlog

from cormorant_api.errors import ApiError
from cormorant_contract.rest.control import DesiredReport
from cormorant_contract.rest.problems import ProblemType
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.stats import FleetStats

log = structlog.get_logger()


class GroupSizes:
    """The latest requested size of each group. Thread-safe."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        """Guards the fields below, and keeps the fleet's order of requests."""
        self.groups = {name: group.desired for name, group in fleet.stats(workers=False).groups.items()}
        self._empty: dict[str, tuple[int, ...]] = {}
        """Slots in which no worker is expected, by group; groups without such slots are left out."""
        self._exact: set[str] = set()
        """Groups that ever had such slots: the fleet gets their indices, because a size alone would keep a gap."""
        self._error = ""

    def want(self, groups: Mapping[str, int], *, empty_slots: Mapping[str, Collection[int]]) -> None:
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
            asked = {name: tuple(sorted(set(found))) for name, found in empty_slots.items() if found}
            self._empty = {name: found for name, found in self._empty.items() if name not in groups} | asked
            self._exact |= asked.keys()
            self.groups, sizes = wanted, dict[str, int | Collection[int]](wanted)
            for name in self._exact & sizes.keys():
                # The lowest free indices: 2 workers and slot 0 empty are (1, 2).
                free = (index for index in count() if index not in self._empty.get(name, ()))
                sizes[name] = tuple(islice(free, wanted[name]))
            try:
                self._fleet.resize(sizes, wait=False)
                self._error = ""
            except CormorantError as error:
                self._error = str(error)
                log.warning("resize_failed", groups=sizes, reason=self._error)

    def describe(self, stats: FleetStats, *, paused: bool) -> DesiredReport:
        """The report for the operator; `paused` is the current `spec.paused`."""
        with self._lock:
            return DesiredReport(
                groups=self.groups,
                paused=paused,
                pending=stats.retiring > 0,
                error=self._error,
                empty_slots=self._empty,
            )
