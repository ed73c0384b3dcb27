"""Fills slots: starts workers in those that are vacant, and decides how many there are."""

from collections.abc import Collection, Mapping
from itertools import islice, takewhile

from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.bookkeeping.core import FleetCore
from cormorant_worker.fleet.bookkeeping.scheduler import Slot
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.fleet.file_limit import raise_file_limit
from cormorant_worker.fleet.transport import WorkerConnection
from cormorant_worker.fleet.turn.bootstrap import Bootstrap
from cormorant_worker.fleet.turn.reaper import Reaper
from cormorant_worker.worker.messages import Start

_MOST_STARTS = 24
"""In one turn."""


class Spawner:
    """Guarded by the fleet's condition."""

    def __init__(self, core: FleetCore, bootstrap: Bootstrap, reaper: Reaper) -> None:
        self.seed = core.job.spec.collection.seed
        """Workers that start from now on derive their streams from it."""
        self._core, self._bootstrap, self._reaper = core, bootstrap, reaper

    def resize(self, workers: int | Mapping[str, int | Collection[int]]) -> None:
        """Say how many slots there are, in all or by group: see `DesiredSlots.resize`."""
        each = self._core.engine.descriptors_each
        self._reaper.give_up(self._core.pool.resize(workers, check=lambda number: raise_file_limit(number, each=each)))
        self._core.servers.reassign()

    def start_missing(self, now: float) -> None:
        """Start workers in vacant slots that need not wait."""
        core = self._core
        if not core.pool.vacant or core.lifecycle.error or core.lifecycle.is_closing or core.scheduler.is_done:
            return
        due = (slot for slot in core.replacements.due(core.pool.vacant, now) if core.servers.can_start(slot))
        for slot in islice(due, _MOST_STARTS):
            core.pool.start(slot)
            core.replacements.forget(slot)
            try:
                self._start(slot)
            except CormorantError as error:
                core.pool.not_started(slot)
                core.lifecycle.fail(error)
                return

    def _start(self, slot: Slot) -> None:
        core = self._core
        group, index = slot
        # Groups of servers come last and do not count: with them and without, environments have the same seeds.
        groups = sorted(core.job.spec.worker_groups, key=lambda known: known.serves)
        found = next(known for known in groups if known.name == group)
        is_server = found.serves
        place = WorkerPlace(
            group=group,
            index=index,
            group_number=groups.index(found),
            num_groups=sum(not known.serves for known in groups),
            warmup_frames=0 if is_server else core.lineage.warmup_of(slot, core.pool.slots.collecting),
            env_restarts=core.env_failures.recent(slot),
            is_server=is_server,
            servers=() if is_server else core.servers.of(slot),
            max_threads=core.engine.cpus_for(core.num_slots),
            num_threads=self._bootstrap.num_threads,
            device=self._device_of(slot),
            seed=self.seed,
        )
        first_free = core.dataset.next_attempt(slot) if core.dataset is not None else 0
        place = core.lineage.begin(place, first_free=first_free, batch_ids=self._bootstrap.batch_ids)
        start = Start(
            job=core.job,
            place=place,
            frames_per_batch=core.scheduler.frames_per_batch,
            overrides=core.options.overrides_of(index),
        )
        listener = core.servers.listener(slot) if is_server else None
        core.background.submit(lambda: core.engine.start(start, listener), lambda found: self._started(slot, found))

    def _device_of(self, slot: Slot) -> str:
        """The worker's device. Workers that ask for the same kind are numbered through their groups."""
        core = self._core
        asked = {
            group.name: core.options.device or ("cuda" if group.device == "gpu" else "cpu")
            for group in core.job.spec.worker_groups
        }
        alike = list(takewhile(lambda name: name != slot[0], (name for name in asked if asked[name] == asked[slot[0]])))
        number = slot[1] + sum(core.pool.slots.sizes.get(name, 0) for name in alike)
        return core.engine.device_of(asked[slot[0]], number)

    def _started(self, slot: Slot, connection: WorkerConnection | Exception) -> None:
        core = self._core
        if isinstance(connection, Exception):
            core.pool.not_started(slot)
            core.lifecycle.fail(connection, what="start a worker")
            return
        now = core.hang_detector.lived_s
        handle = WorkerHandle(connection, core.requests.stuck, stream=connection.place, last_progress=now)
        core.pool.admit(slot, handle)
        core.servers.joined(handle)
        if handle.is_server:
            self._bootstrap.tell_spaces(handle)
        core.hang_detector.add(slot)
        core.counters.joined(slot[0])
        if slot not in core.pool.slots:
            self._reaper.let_go(handle)
        if core.lifecycle.is_closing:
            self._reaper.lose(handle, is_killed=True)  # it has nothing to lose yet
