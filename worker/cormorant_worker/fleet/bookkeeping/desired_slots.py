"""Which slots of a fleet are to be filled. Guarded by the fleet's condition."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count, islice

from cormorant_contract.job import CollectorJob
from cormorant_worker.errors import FleetError, LastWorker, NoSuchWorker
from cormorant_worker.fleet.bookkeeping.scheduler import Slot


class DesiredSlots:
    """In the order of the manifest's groups; iterating gives them."""

    def __init__(self, job: CollectorJob) -> None:
        self._job = job
        self._wanted: tuple[Slot, ...] = ()
        self._known: frozenset[Slot] = frozenset()
        self._serving_groups = frozenset(g.name for g in job.spec.worker_groups if g.serves)
        self.collecting: tuple[Slot, ...] = ()
        """Those whose workers step environments: all, without inference servers."""
        self.serving: tuple[Slot, ...] = ()
        """Those of inference servers."""
        self.sizes: Mapping[str, int] = {}
        """By group."""

    def __contains__(self, slot: object) -> bool:
        return slot in self._known

    def __iter__(self) -> Iterator[Slot]:
        """One after the other, by group and index."""
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def resize(
        self, workers: int | Mapping[str, int | Collection[int]], *, check: Callable[[int], None] = lambda _: None
    ) -> frozenset[Slot]:
        """Say how many there are, in all or by group: groups that are not named keep theirs. The lowest free index is
        filled first, the highest is given up first.

        Args:
            workers: in all, not counting inference servers, or by group; a group's indices instead of its size fill
                exactly these.
            check: raises where there cannot be so many.

        Returns:
            Those that are given up.

        Raises:
            FleetError: no such group, a negative size, or no worker would be left.
        """
        names = [group.name for group in self._job.spec.worker_groups]
        if isinstance(workers, int):
            counted = Counter(self._slot_of(number)[0] for number in range(workers))
            sizes: dict[str, int | Collection[int]] = {
                group.name: self.sizes.get(group.name, self._job.spec.size_of(group))
                if group.name in self._serving_groups
                else counted[group.name]
                for group in self._job.spec.worker_groups
            }
        else:
            sizes = dict(workers)
        if unknown := sorted(set(sizes) - set(names)):
            raise FleetError(f"there are no worker groups {', '.join(unknown)}; the manifest has {', '.join(names)}")
        lowest = {name: size if isinstance(size, int) else min(size, default=0) for name, size in sizes.items()}
        if negative := [f"{name}: {number}" for name, number in lowest.items() if number < 0]:
            raise FleetError(f"sizes and indices of worker groups begin at 0; got {', '.join(negative)}")
        wanted: list[Slot] = []
        for name in names:
            filled = sorted(index for group, index in self._wanted if group == name)
            size = sizes.get(name, len(filled))
            if not isinstance(size, int):
                wanted += [(name, index) for index in sorted(set(size))]
                continue
            taken = set(filled)
            free = (index for index in count() if index not in taken)
            wanted += [(name, index) for index in sorted([*filled[:size], *islice(free, max(0, size - len(filled)))])]
        check(len(wanted))
        return self._want(wanted)

    def of(self, names: Collection[str]) -> frozenset[Slot]:
        """The slots of workers by name."""
        known = {"{}-{}".format(*slot): slot for slot in self._wanted}
        if unknown := [name for name in names if name not in known]:
            raise NoSuchWorker(f"there is no worker {', '.join(unknown)}; there are {', '.join(known)}")
        return frozenset(known[name] for name in names)

    def _want(self, wanted: list[Slot]) -> frozenset[Slot]:
        collecting = tuple(slot for slot in wanted if slot[0] not in self._serving_groups)
        if not collecting:
            raise LastWorker("0 workers: a fleet needs at least 1; pause it instead")
        serving = tuple(slot for slot in wanted if slot[0] in self._serving_groups)
        if self._serving_groups and not serving:
            raise LastWorker("0 inference servers: no worker of this job can act by itself; keep 1")
        self.collecting, self.serving = collecting, serving
        known = frozenset(wanted)
        given_up = self._known - known
        self._wanted, self._known = tuple(wanted), known
        self.sizes = Counter(group for group, _ in wanted)
        return given_up

    def _slot_of(self, number: int) -> Slot:
        """The slot of the n-th worker: the manifest's fixed groups first, then the elastic one."""
        elastic = self._job.spec.elastic
        for group in self._job.spec.worker_groups:
            if group.name == elastic.name or group.name in self._serving_groups:
                continue
            size = self._job.spec.size_of(group)
            if number < size:
                return (group.name, number)
            number -= size
        return (elastic.name, number)
