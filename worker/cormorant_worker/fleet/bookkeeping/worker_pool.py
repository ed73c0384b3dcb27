"""Which worker is in which slot. Bookkeeping alone: `spawner.py` fills slots, `reaper.py` empties them.

vacant -> starting -> worker (ready -> synced -> leaving) -> gone -> vacant
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from types import MappingProxyType

from cormorant_worker.fleet.bookkeeping.desired_slots import DesiredSlots
from cormorant_worker.fleet.bookkeeping.scheduler import Slot
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle

_SHOWN = 8
"""Workers named in a message."""
_LONGEST_INDEX = 10
"""Digits."""


class WorkerPool:
    """Guarded by the fleet's condition."""

    def __init__(self, slots: DesiredSlots) -> None:
        self.slots = slots
        """Slots that are to be filled."""
        self._workers: dict[Slot, WorkerHandle] = {}
        self.workers: Mapping[Slot, WorkerHandle] = MappingProxyType(self._workers)
        self._gone: dict[Slot, WorkerHandle] = {}
        """Workers that have ended or are being ended, and are not accounted for yet."""
        self._vacant: set[Slot] = set()
        self._starting: set[Slot] = set()
        self._unsynced: set[Slot] = set()
        """Slots without a worker that may hold tickets."""
        self._leaving: set[Slot] = set()
        """Slots whose workers get no more tickets."""
        self._untold: dict[Slot, None] = {}
        """Slots whose workers were not told to finish."""
        self.joined: deque[WorkerHandle] = deque()
        """Workers whose connections the selector does not know yet; it takes them out."""
        self.parted: deque[tuple[WorkerHandle, Callable[[], None]]] = deque()
        """Workers that the selector may forget, and what to call then; it takes them out."""

    # -- what there is -----------------------------------------------------------------------------------------

    @property
    def vacant(self) -> Collection[Slot]:
        """Desired slots with no worker in them, or on its way in or out."""
        return self._vacant

    @property
    def is_complete(self) -> bool:
        """True when every slot has a worker that may hold tickets, and no other worker is left."""
        return not (self._unsynced or self._starting or self._gone) and len(self._workers) == len(self.slots)

    @property
    def has_begun(self) -> bool:
        """True when some slot has a worker that may hold tickets, and those that leave have left."""
        return not self._leaving and len(self._unsynced) < len(self.slots)

    @property
    def is_empty(self) -> bool:
        return not (self._workers or self._starting or self._gone)

    @property
    def has_gone(self) -> bool:
        """True while a worker that has ended is not accounted for."""
        return bool(self._gone)

    @property
    def has_collectors(self) -> bool:
        """True while a worker that collects lives, or is being started."""
        serving = self.slots.serving
        return any(not handle.is_server for handle in self._workers.values()) or any(
            slot not in serving for slot in self._starting
        )

    def is_serving(self, slot: Slot) -> bool:
        """True when a slot's worker may hold tickets."""
        handle = self._workers.get(slot)
        return handle is not None and handle.is_synced

    def find(self, name: str) -> WorkerHandle | None:
        group, _, index = name.rpartition("-")
        handle = self._workers.get((group, int(index))) if index.isdecimal() and len(index) < _LONGEST_INDEX else None
        return handle if handle is not None and handle.name == name else None

    def all_handles(self) -> tuple[WorkerHandle, ...]:
        """Also of workers that are being ended. Callable without the condition."""
        return (*tuple(self._workers.values()), *tuple(self._gone.values()))

    def untold(self, *, only_leaving: bool) -> Iterator[WorkerHandle]:
        """Workers without a ticket that were not told to finish."""
        slots = [slot for slot in self._leaving if slot in self._untold] if only_leaving else self._untold
        return (self._workers[slot] for slot in slots if not self._workers[slot].tickets)

    def describe(self) -> str:
        """What workers do, for messages: a few of them."""
        shown = sorted(islice(self._workers.items(), _SHOWN))
        found = [f"{handle.name} is {handle.connection.describe_doing()}" for _, handle in shown]
        if (more := len(self._workers) - len(found)) > 0:
            found.append(f"and {more:,} more")
        return ", ".join(found) or "there are no workers"

    # -- what happens ------------------------------------------------------------------------------------------

    def resize(
        self, workers: int | Mapping[str, int | Collection[int]], *, check: Callable[[int], None]
    ) -> frozenset[Slot]:
        """Say how many slots there are: see `DesiredSlots.resize`. Returns those that are given up."""
        given_up = self.slots.resize(workers, check=check)
        self._unsynced = {slot for slot in self.slots if not self.is_serving(slot)}
        self._vacant = {
            slot
            for slot in self.slots
            if not any(slot in taken for taken in (self._workers, self._starting, self._gone))
        }
        return given_up

    def start(self, slot: Slot) -> None:
        self._vacant.discard(slot)
        self._starting.add(slot)

    def not_started(self, slot: Slot) -> None:
        """A worker could not be started. The fleet cannot go on, and the slot stays empty."""
        self._starting.discard(slot)

    def admit(self, slot: Slot, handle: WorkerHandle) -> None:
        self._starting.discard(slot)
        self._workers[slot] = handle
        self._untold[slot] = None
        self.joined.append(handle)

    def synced(self, handle: WorkerHandle) -> None:
        """A worker has the current weights: it may hold tickets."""
        handle.is_synced = True
        self._unsynced.discard(handle.slot)

    def let_go(self, handle: WorkerHandle) -> None:
        handle.is_leaving = True
        self._leaving.add(handle.slot)

    def told_to_finish(self, handle: WorkerHandle) -> None:
        del self._untold[handle.slot]

    def lose(self, handle: WorkerHandle, then: Callable[[], None]) -> None:
        """A worker has ended, or is being ended. `then`: called once its connection is not listened to any more."""
        slot = handle.slot
        del self._workers[slot]
        handle.is_gone = True
        self._gone[slot] = handle
        self._untold.pop(slot, None)
        self._leaving.discard(slot)
        if slot in self.slots:
            self._unsynced.add(slot)
        self.parted.append((handle, then))

    def accounted_for(self, slot: Slot) -> None:
        """Nothing is left of the worker that was in a slot."""
        del self._gone[slot]
        if slot in self.slots:
            self._vacant.add(slot)

    def clear(self) -> None:
        self._workers.clear()
