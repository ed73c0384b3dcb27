"""All slots of a fleet, by state."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, count, islice

from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import FleetError, LastWorker, NoSuchWorker
from cormorant_worker.fleet.scheduler import SlotKey
from cormorant_worker.fleet.slot import LIVING, SERVING, TRANSITIONS, Question, Slot, SlotState, WorkerHandle
from cormorant_worker.worker.messages import Command, PauseStepping, ResumeStepping, Stop

_SHOWN = 8
"""Workers named in a message."""


class Slots:
    """By group and index. Guarded by the fleet's condition."""

    def __init__(self, job: CollectorJob, written: Mapping[SlotKey, int]) -> None:
        """No slot is wanted yet. `written`: frames that the dataset has of each."""
        self._job, self._written = job, written
        self._serving_groups = frozenset(g.name for g in job.spec.worker_groups if g.serves)
        self._known: dict[SlotKey, Slot] = {}
        self._by_name: dict[str, Slot] = {}
        self.collecting: tuple[Slot, ...] = ()
        """Wanted slots whose workers step environments, in the order of the manifest's groups."""
        self.serving: tuple[Slot, ...] = ()
        """Those of inference servers."""
        self.sizes: Mapping[str, int] = {}
        """Wanted slots by group."""
        self._in: dict[SlotState, dict[Slot, None]] = {state: {} for state in SlotState}
        """By state, in the order in which they entered it."""

    # -- what there is -----------------------------------------------------------------------------------------

    def __getitem__(self, key: SlotKey) -> Slot:
        """A slot, wanted or not; it need not have existed before."""
        if key not in self._known:
            slot = Slot(key, is_server=key[0] in self._serving_groups, written=self._written.get(key, 0))
            self._known[key] = self._by_name[slot.name] = slot
            self._in[slot.state][slot] = None
        return self._known[key]

    @property
    def wanted(self) -> Iterator[Slot]:
        return chain(self.collecting, self.serving)

    def in_state(self, *states: SlotState) -> Iterator[Slot]:
        """Do not move slots while iterating."""
        return chain.from_iterable(self._in[state] for state in states)

    def count(self, *states: SlotState) -> int:
        return sum(len(self._in[state]) for state in states)

    def workers_in(self, *states: SlotState) -> Iterator[WorkerHandle]:
        """Do not move slots while iterating."""
        return (slot.worker for slot in self.in_state(*states) if slot.worker is not None)

    @property
    def workers(self) -> Iterator[WorkerHandle]:
        """Workers that are listened to."""
        return self.workers_in(*LIVING)

    @property
    def has_collectors(self) -> bool:
        """True while a collecting worker runs or is being started."""
        return any(not slot.is_server for slot in self.in_state(SlotState.STARTING, *LIVING))

    @property
    def is_complete(self) -> bool:
        """True if every wanted slot has a worker that may hold tickets, and no other worker is left."""
        wanted = len(self.collecting) + len(self.serving)
        return self.count(SlotState.WORKING) == wanted and self.count(*LIVING) == wanted and not self.is_changing

    @property
    def is_changing(self) -> bool:
        """True while a worker is being started, or an ended worker is not accounted for."""
        return self.count(SlotState.STARTING, SlotState.GONE) > 0

    @property
    def has_begun(self) -> bool:
        """True if some slot has a worker that may hold tickets, and leaving workers have left."""
        return self.count(SlotState.WORKING) > 0 and not self.count(SlotState.LEAVING, SlotState.FINISHING)

    @property
    def is_empty(self) -> bool:
        return not (self.count(*LIVING) or self.is_changing)

    def find(self, name: str) -> WorkerHandle | None:
        """The current worker of this name."""
        slot = self._by_name.get(name)
        return slot.worker if slot is not None and slot.state in LIVING else None

    def named(self, names: Collection[str]) -> frozenset[Slot]:
        """Wanted slots by name."""
        known = {slot.name: slot for slot in self.wanted}
        if unknown := [name for name in names if name not in known]:
            raise NoSuchWorker(f"there is no worker {', '.join(unknown)}; there are {', '.join(known)}")
        return frozenset(known[name] for name in names)

    def describe(self) -> str:
        """Activities of a few workers, for messages."""
        shown = sorted(islice(self.workers, _SHOWN), key=lambda worker: worker.slot.key)
        described = [f"{worker.name} is {worker.connection.describe_doing()}" for worker in shown]
        if (more := self.count(*LIVING) - len(described)) > 0:
            described.append(f"and {more:,} more")
        return ", ".join(described) or "there are no workers"

    def ask_all(self, command: Command) -> list[Question]:
        """Send a request to every ready collecting worker."""
        return [handle.ask(command) for handle in self.workers if handle.is_ready and not handle.slot.is_server]

    def tell_all(self, command: PauseStepping | ResumeStepping | Stop, *, only_ready: bool = True) -> None:
        for handle in self.workers:
            if handle.is_ready or not only_ready:
                handle.tell(command)

    # -- what happens ------------------------------------------------------------------------------------------

    def move(self, slot: Slot, state: SlotState) -> None:
        if state not in TRANSITIONS[slot.state]:
            raise FleetError(f"slot {slot.name} cannot become {state.name} while it is {slot.state.name}")
        del self._in[slot.state][slot]
        self._in[state][slot] = None
        slot.state = state
        if slot.worker is not None and state in SERVING:
            slot.worker.reached = state

    def fill(self, slot: Slot, handle: WorkerHandle) -> None:
        slot.worker = handle
        self.move(slot, SlotState.BUILDING)

    def vacate(self, slot: Slot) -> None:
        """Free a slot whose worker is gone or could not be started."""
        slot.worker = None
        self.move(slot, SlotState.VACANT if slot.is_wanted else SlotState.RETIRED)

    def clear(self) -> None:
        """Clear all slots after the fleet is closed and its workers have ended."""
        for slot in tuple(self.in_state(*LIVING)):
            self.move(slot, SlotState.GONE)

    def resize(
        self, workers: int | Mapping[str, int | Collection[int]], *, check: Callable[[int], None] = lambda _: None
    ) -> list[Slot]:
        """Set how many slots are wanted, in all (without inference servers) or by group; groups that are not named keep
        their size. The lowest free index is filled first, the highest retired first; a group's indices instead of its
        size fill exactly these. `check` raises if that many are impossible. Returns the retired slots. Raises
        FleetError for an unknown group, a negative size, or no worker left.
        """
        if not isinstance(workers, int | Mapping):
            raise FleetError(f"workers is {workers!r}; give a number, or a mapping of groups to numbers")
        names = [group.name for group in self._job.spec.worker_groups]
        sizes = self._sizes_of(workers) if isinstance(workers, int) else dict(workers)
        if unknown := sorted(set(sizes) - set(names)):
            raise FleetError(f"there are no worker groups {', '.join(unknown)}; the manifest has {', '.join(names)}")
        lowest = {name: size if isinstance(size, int) else min(size, default=0) for name, size in sizes.items()}
        if negative := [f"{name}: {number}" for name, number in lowest.items() if number < 0]:
            raise FleetError(f"sizes and indices of worker groups begin at 0; got {', '.join(negative)}")
        keys: list[SlotKey] = []
        for name in names:
            filled = {slot.key[1]: None for slot in self.wanted if slot.group == name}
            size = sizes.get(name, len(filled))
            if isinstance(size, int):
                free = (index for index in count() if index not in filled)
                size = [*islice(sorted(filled), size), *islice(free, max(0, size - len(filled)))]
            keys += [(name, index) for index in sorted(set(size))]
        check(len(keys))
        return self._want(keys)

    def _sizes_of(self, workers: int) -> dict[str, int | Collection[int]]:
        """The first workers are the manifest's fixed groups', the others the elastic one's; inference servers keep
        their size.
        """
        spec, sizes = self._job.spec, dict[str, int | Collection[int]]()
        workers = max(0, workers)
        for group in spec.worker_groups:
            if group.name in self._serving_groups:
                sizes[group.name] = self.sizes.get(group.name, spec.size_of(group))
            elif group.name != spec.elastic.name:
                sizes[group.name] = size = min(workers, spec.size_of(group))
                workers -= size
        return sizes | {spec.elastic.name: workers}

    def _want(self, keys: list[SlotKey]) -> list[Slot]:
        if all(group in self._serving_groups for group, _ in keys):
            raise LastWorker("0 workers: a fleet needs at least 1; pause it instead")
        if self._serving_groups and not any(group in self._serving_groups for group, _ in keys):
            raise LastWorker("0 inference servers: no worker of this job can act by itself; keep 1")
        wanted = {self[key]: None for key in keys}
        given_up = [slot for slot in self.wanted if slot not in wanted]
        for slot in given_up:
            slot.is_wanted = False
            if slot.state is SlotState.VACANT:
                self.move(slot, SlotState.RETIRED)
        for slot in wanted:
            slot.is_wanted = True
            if slot.state is SlotState.RETIRED:
                self.move(slot, SlotState.VACANT)
        self.collecting = tuple(slot for slot in wanted if not slot.is_server)
        self.serving = tuple(slot for slot in wanted if slot.is_server)
        self.sizes = Counter(slot.group for slot in wanted)
        return given_up
