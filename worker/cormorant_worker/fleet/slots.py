"""All slots of a fleet: by state, which inference server acts for which, and what they have used up. Guarded by the
fleet's condition.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice

from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.collect.trajectories import MAX_EPOCH, trajectory_base
from cormorant_worker.errors import FleetError, LastWorker, NoSuchWorker, StateError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.scheduler import SlotKey
from cormorant_worker.fleet.slot import LIVING, SERVING, TRANSITIONS, Question, Slot, SlotState, WorkerHandle
from cormorant_worker.inference.address import ServerAddress
from cormorant_worker.worker.messages import AssignServers, Command, PlainCommand, Sealed

_SHOWN = 8
"""Workers named in a message."""
_BATCHES_AHEAD = 4
"""Batches that a worker may have put into a dataset beyond the last one that its fleet heard of, and some to spare."""


class Slots:
    """By group and index."""

    def __init__(self, job: CollectorJob, written: Mapping[SlotKey, int]) -> None:
        """No slot is wanted yet. `written`: frames that the dataset has of each."""
        self._job, self._written = job, written
        self._serving_groups = frozenset(g.name for g in job.spec.worker_groups if g.serves)
        self._known: dict[SlotKey, Slot] = {}
        self._by_name: dict[str, Slot] = {}
        self.collecting: tuple[Slot, ...] = ()
        """Wanted slots whose workers step environments, in the order of the manifest's groups."""
        self.serving: tuple[Slot, ...] = ()
        """Wanted slots of inference servers."""
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
        return self.workers_in(*LIVING)

    @property
    def has_collectors(self) -> bool:
        """True while a collecting worker runs or is being started."""
        return any(not slot.is_server for slot in self.in_state(SlotState.STARTING, *LIVING))

    @property
    def is_complete(self) -> bool:
        """True if every wanted slot has a worker that may hold tickets, and no other worker is left."""
        taken = self.count(SlotState.STARTING, *LIVING, SlotState.GONE)
        return self.count(SlotState.WORKING) == taken == len(self.collecting) + len(self.serving)

    @property
    def is_empty(self) -> bool:
        """True if no worker runs or is being started, and those that ended are accounted for."""
        return not self.count(SlotState.STARTING, *LIVING, SlotState.GONE)

    def find(self, name: str) -> WorkerHandle | None:
        """The current worker of this name."""
        slot = self._by_name.get(name)
        return slot.worker if slot is not None and slot.state in LIVING else None

    def named(self, names: Collection[str]) -> frozenset[Slot] | None:
        """Slots that receive weights published for these workers; without names, None: all slots with a policy."""
        if not names:
            return None
        known = {slot.name: slot for slot in self.wanted}
        if unknown := [name for name in names if name not in known]:
            raise NoSuchWorker(f"there is no worker {', '.join(unknown)}; there are {', '.join(known)}")
        if self.serving and (idle := sorted(name for name in names if not known[name].is_server)):
            raise FleetError(
                f"no policy acts in worker {', '.join(idle)}: inference servers act for it; name servers, or none"
            )
        return frozenset(known[name] for name in names)

    def describe(self) -> str:
        """Activities of a few workers, for messages."""
        shown = sorted(islice(self.workers, _SHOWN), key=lambda worker: worker.slot.key)
        described = [f"{worker.name} is {worker.connection.describe_doing()}" for worker in shown]
        if (more := self.count(*LIVING) - len(described)) > 0:
            described.append(f"and {more:,} more")
        return ", ".join(described) or "there are no workers"

    def ask_all(self, command: Command) -> list[Question]:
        return [handle.ask(command) for handle in self.workers if handle.is_ready and not handle.slot.is_server]

    def tell_all(self, command: PlainCommand, *, only_ready: bool = True) -> None:
        for handle in self.workers:
            if handle.is_ready or not only_ready:
                handle.ask(command)

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
        self._reassign_servers()
        return given_up

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

    # -- inference servers -------------------------------------------------------------------------------------

    def servers_of(self, slot: Slot) -> tuple[ServerAddress, ...]:
        """Addresses for a worker's slot, of which neighbors prefer different ones; empty: it calls its own policy."""
        if not slot.is_wanted or slot.is_server:
            return slot.servers  # given up: it keeps what it has until it ends
        if addresses := [known.address for known in self.serving if known.address is not None]:
            first = self.collecting.index(slot) % len(addresses)
            slot.servers = (*addresses[first:], *addresses[:first])
        return slot.servers

    def set_address(self, slot: Slot, address: ServerAddress | None) -> None:
        """A server listens at an address; None: it is gone, and other servers serve its workers."""
        if slot.address != address:
            slot.address = address
            self._reassign_servers()

    def _reassign_servers(self) -> None:
        for slot in self.collecting:
            before = slot.servers
            if (now := self.servers_of(slot)) != before and slot.worker is not None and slot.state in LIVING:
                slot.worker.ask(AssignServers(servers=now))


class Lineage:
    """Random streams, trajectory ids and random frames that slots have used, so that none is issued twice. Writes the
    fields of slots that record this.
    """

    def __init__(self, *, epoch: int, warmup_frames: int) -> None:
        self.epoch = epoch
        """A number that no fleet of this job had before."""
        self.run = uuid.uuid4().hex
        """Names this fleet, in states that it saves."""
        self._warmup_frames = warmup_frames
        """Random frames that the job still wants and that belong to no slot yet."""
        self._is_shared_out = False

    def begin(self, slot: Slot, place: WorkerPlace, *, first_free: int = 0, batch_ids: int = 0) -> WorkerPlace:
        """The place of the slot's next attempt, at least `first_free`, with a random stream that was never used, and
        trajectory ids past those of some more batches of `batch_ids`.
        """
        slot.attempt = max(slot.attempt + 1, first_free)
        after = slot.next_trajectory + _BATCHES_AHEAD * batch_ids if slot.next_trajectory else 0
        place = replace(place, attempt=slot.attempt, epoch=self.epoch, first_trajectory=after)
        return replace(place, first_trajectory=trajectory_base(place))

    def is_last(self, saved: FleetState, slot: Slot, dataset: str) -> bool:
        """True if a slot has delivered nothing since a state was saved, according to this fleet and its dataset."""
        knows = saved.run == self.run or bool(dataset and saved.dataset == dataset)
        return knows and saved.written.get(slot.name) == slot.written

    def join(self, saved: FleetState, slots: Collection[Slot]) -> None:
        """Continue a state's fleet, with these slots: nothing that it or its successors may have used is used again."""
        if saved.run != self.run and saved.epoch >= self.epoch:
            if saved.epoch >= MAX_EPOCH:
                raise StateError(f"the state's epoch {saved.epoch} is the last one; start a new job from its weights")
            self.epoch = saved.epoch + 1
        for slot in slots:
            slot.attempt = max(slot.attempt, saved.attempts.get(slot.name, -1))

    def landed(self, slot: Slot, sealed: Sealed) -> None:
        slot.written += sealed.num_frames
        slot.next_trajectory = max(slot.next_trajectory, sealed.next_trajectory)
        if slot.warmup_frames:
            slot.warmup_frames = max(0, slot.warmup_frames - sealed.random_frames)

    # -- random frames -----------------------------------------------------------------------------------------

    def warmup_of(self, slot: Slot, slots: Sequence[Slot]) -> int:
        """Random frames of the slot's next worker: its share of all, or that of removed slots, less those delivered."""
        if not self._is_shared_out:
            self._is_shared_out = True
            share, rest = divmod(self._warmup_frames, len(slots))
            for i, known in enumerate(slots):
                known.warmup_frames = known.warmup_share = share + (i < rest)
            self._warmup_frames = 0
        if slot.warmup_frames is None:
            slot.warmup_frames = slot.warmup_share = self._warmup_frames
            self._warmup_frames = 0
        return slot.warmup_frames

    def give_up(self, slot: Slot) -> None:
        """Pass the random frames that a removed slot still owed to another slot."""
        self._warmup_frames += slot.warmup_frames or 0
        slot.warmup_frames = None
