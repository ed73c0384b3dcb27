"""The inference servers of a fleet: their addresses, and the assignment of workers."""

from collections.abc import Collection

from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.slot import LIVING, Slot, WorkerHandle
from cormorant_worker.fleet.slots import Slots
from cormorant_worker.inference.address import Served, ServerAddress
from cormorant_worker.worker.messages import AssignServers


class InferenceServers:
    """Writes the addresses of servers' slots, and the servers of workers' slots. Guarded by the fleet's condition."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.served: dict[str, dict[str, float]] = {}
        """By group, summed over servers that are gone, too: the fields of `Served`."""

    def of(self, slot: Slot) -> tuple[ServerAddress, ...]:
        """Addresses for a worker's slot, of which neighbors prefer different ones; empty: it calls its own policy."""
        if not slot.is_wanted or slot.is_server:
            return slot.servers  # given up: it keeps what it has until it ends
        if addresses := [known.address for known in self._slots.serving if known.address is not None]:
            first = self._slots.collecting.index(slot) % len(addresses)
            slot.servers = (*addresses[first:], *addresses[:first])
        return slot.servers

    def can_start(self, slot: Slot) -> bool:
        """Whether a slot's worker can start without waiting for a server's address."""
        serving = self._slots.serving
        return not serving or slot.is_server or any(known.address is not None for known in serving)

    def listens(self, server: Slot, address: ServerAddress) -> None:
        server.address = address
        self.reassign()

    def gone(self, slot: Slot) -> None:
        """Remove the address of a server that is gone: other servers serve its workers."""
        if slot.address is not None:
            slot.address = None
            self.reassign()

    def named(self, names: Collection[str]) -> frozenset[Slot] | None:
        """Slots that receive weights published for these workers; without names, None: all slots with a policy."""
        slots = self._slots.named(names) if names else None
        if slots and self._slots.serving and (idle := sorted(slot.name for slot in slots if not slot.is_server)):
            names = ", ".join(idle)
            raise FleetError(f"no policy acts in worker {names}: inference servers act for it; name servers, or none")
        return slots

    def reassign(self) -> None:
        """After slots have changed, notify workers whose server changes."""
        for slot in self._slots.collecting:
            before = slot.servers
            if (now := self.of(slot)) != before and slot.worker is not None and slot.state in LIVING:
                slot.worker.tell(AssignServers(servers=now))

    def joined(self, handle: WorkerHandle) -> None:
        """After a worker has started, notify it if its servers have changed meanwhile."""
        if handle.connection.place.servers != (now := self.of(handle.slot)):
            handle.tell(AssignServers(servers=now))

    def note(self, handle: WorkerHandle, served: Served) -> None:
        books = self.served.setdefault(handle.slot.group, dict.fromkeys(served.__slots__, 0.0))
        for name in books:
            books[name] += getattr(served, name)
