"""The inference servers of a fleet: where they listen, and which worker uses which.

On one machine, the fleet holds the listening socket of each server's slot: it outlives the processes that fill the
slot. In a cluster each server process has an address of its own, and tells it.
"""

import socket
from collections.abc import Callable, Collection

from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.slot import LIVING, Slot, WorkerHandle
from cormorant_worker.fleet.slots import Slots
from cormorant_worker.inference.address import Address, NodeAddress
from cormorant_worker.worker.messages import AssignServers, Served


class InferenceServers:
    """Writes where servers' slots listen, and which servers workers' slots use. Guarded by the fleet's condition."""

    def __init__(self, slots: Slots, listen: Callable[[], socket.socket | None]) -> None:
        self._slots, self._listen = slots, listen
        self.served: dict[str, dict[str, float]] = {}
        """By group, summed over servers that are gone, too: the fields of `Served`."""

    def listener(self, slot: Slot) -> socket.socket | None:
        """The socket that a server of this slot accepts workers from; None: it opens its own."""
        if slot.listener is None:
            slot.listener = self._listen()
        return slot.listener

    def of(self, slot: Slot) -> tuple[Address, ...]:
        """Addresses for a worker's slot, the one to use first; empty: it acts itself. Neighbors use different ones."""
        if not slot.is_wanted or slot.is_server:
            return slot.servers  # given up: it keeps what it has until it ends
        if addresses := [address for known in self._slots.serving if (address := self._address(known)) is not None]:
            first = self._slots.collecting.index(slot) % len(addresses)
            slot.servers = (*addresses[first:], *addresses[:first])
        return slot.servers

    def _address(self, server: Slot) -> Address | None:
        if (listener := self.listener(server)) is not None:
            address: bytes | str = listener.getsockname()
            return address
        return server.address

    def can_start(self, slot: Slot) -> bool:
        """Whether a slot's worker need not wait for a server to tell where it listens."""
        serving = self._slots.serving
        return not serving or slot.is_server or any(self._address(known) is not None for known in serving)

    def listens(self, server: Slot, address: NodeAddress) -> None:
        server.address = address
        self.reassign()

    def gone(self, slot: Slot) -> None:
        """The process in a slot is gone, and with it its own address: others serve its workers."""
        if slot.address is not None:
            slot.address = None
            self.reassign()

    def named(self, names: Collection[str]) -> frozenset[Slot] | None:
        """The slots that weights for these workers go to; None, and without names: all that act."""
        slots = self._slots.named(names) if names else None
        if slots and self._slots.serving and (idle := sorted(slot.name for slot in slots if not slot.is_server)):
            names = ", ".join(idle)
            raise FleetError(f"no policy acts in worker {names}: inference servers act for it; name servers, or none")
        return slots

    def reassign(self) -> None:
        """Slots have changed: tell workers whose server changes."""
        for slot in self._slots.collecting:
            before = slot.servers
            if (now := self.of(slot)) != before and slot.worker is not None and slot.state in LIVING:
                slot.worker.tell(AssignServers(servers=now))

    def joined(self, handle: WorkerHandle) -> None:
        """A worker was started: servers may have changed meanwhile."""
        if handle.connection.place.servers != (now := self.of(handle.slot)):
            handle.tell(AssignServers(servers=now))

    def retire(self, slot: Slot) -> None:
        """No server will listen there any more."""
        if slot.listener is not None:
            slot.listener.close()
            slot.listener = None

    def note(self, handle: WorkerHandle, served: Served) -> None:
        books = self.served.setdefault(handle.slot.group, dict.fromkeys(served.__slots__, 0.0))
        for name in books:
            books[name] += getattr(served, name)

    def close(self) -> None:
        for slot in self._slots.known:
            self.retire(slot)
