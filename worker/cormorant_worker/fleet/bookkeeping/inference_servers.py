"""The inference servers of a fleet: where they listen, and which worker uses which.

On one machine, the fleet holds the listening socket of each server's slot: it outlives the processes that fill the
slot. In a cluster each server process has an address of its own, and tells it.
"""

import socket
from collections.abc import Callable, Collection, Iterable, Mapping

from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.bookkeeping.desired_slots import DesiredSlots
from cormorant_worker.fleet.bookkeeping.requests import Requests
from cormorant_worker.fleet.bookkeeping.scheduler import Slot
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.inference.address import Address, NodeAddress
from cormorant_worker.worker.messages import Served


class InferenceServers:
    """Guarded by the fleet's condition."""

    def __init__(
        self,
        slots: DesiredSlots,
        workers: Mapping[Slot, WorkerHandle],
        requests: Requests,
        listen: Callable[[], socket.socket | None],
    ) -> None:
        self._slots, self._workers, self._requests, self._listen = slots, workers, requests, listen
        self._listeners: dict[Slot, socket.socket] = {}
        self._addresses: dict[Slot, NodeAddress] = {}
        """Addresses of servers that listen on one of their own."""
        self._assigned: dict[Slot, tuple[Address, ...]] = {}
        """What each worker was told last."""
        self.served: dict[str, dict[str, float]] = {}
        """By group, summed over servers that are gone, too: the fields of `Served`."""

    def listener(self, slot: Slot) -> socket.socket | None:
        """The socket that a server of this slot accepts workers from; None: it opens its own."""
        if slot not in self._listeners and (found := self._listen()) is not None:
            self._listeners[slot] = found
        return self._listeners.get(slot)

    def of(self, slot: Slot) -> tuple[Address, ...]:
        """Addresses for a worker's slot, the one to use first; empty: it acts itself. Neighbours use different ones."""
        if slot not in self._slots.collecting:
            return self._assigned.get(slot, ())  # given up: it keeps what it has until it ends
        if addresses := [found for known in self._slots.serving if (found := self._address(known)) is not None]:
            first = self._slots.collecting.index(slot) % len(addresses)
            self._assigned[slot] = (*addresses[first:], *addresses[:first])
        return self._assigned.get(slot, ())

    def _address(self, slot: Slot) -> Address | None:
        if (listener := self.listener(slot)) is not None:
            address: bytes | str = listener.getsockname()
            return address
        return self._addresses.get(slot)

    def can_start(self, slot: Slot) -> bool:
        """Whether a slot's worker need not wait for a server to tell where it listens."""
        serving = self._slots.serving
        return not serving or slot in serving or any(self._address(known) is not None for known in serving)

    def listens(self, slot: Slot, address: NodeAddress) -> None:
        self._addresses[slot] = address
        self.reassign()

    def gone(self, slot: Slot) -> None:
        """The process in a slot is gone, and with it its own address: others serve its workers."""
        if self._addresses.pop(slot, None) is not None:
            self.reassign()

    def named(self, names: Collection[str]) -> frozenset[Slot] | None:
        """The slots that weights for these workers go to; None, and without names: all that act."""
        slots = self._slots.of(names) if names else None
        if slots and self._slots.serving and (idle := sorted(slots - set(self._slots.serving))):
            found = ", ".join(f"{group}-{index}" for group, index in idle)
            raise FleetError(f"no policy acts in worker {found}: inference servers act for it; name servers, or none")
        return slots

    def reassign(self) -> None:
        """Slots have changed: tell workers whose server changes."""
        for slot in self._slots.collecting:
            handle, before = self._workers.get(slot), self._assigned.get(slot, ())
            if (now := self.of(slot)) != before and handle is not None:
                self._requests.tell(handle, "servers", servers=now)

    def joined(self, handle: WorkerHandle) -> None:
        """A worker was started: servers may have changed meanwhile."""
        if handle.connection.place.servers != (now := self.of(handle.slot)):
            self._requests.tell(handle, "servers", servers=now)

    def retire(self, slots: Iterable[Slot]) -> None:
        """No server will listen there any more."""
        for slot in slots:
            if (listener := self._listeners.pop(slot, None)) is not None:
                listener.close()

    def note(self, handle: WorkerHandle, served: Served) -> None:
        """A server told what it did."""
        books = self.served.setdefault(handle.group, dict.fromkeys(served.__slots__, 0.0))
        for name in books:
            books[name] += getattr(served, name)

    def close(self) -> None:
        self.retire(tuple(self._listeners))
