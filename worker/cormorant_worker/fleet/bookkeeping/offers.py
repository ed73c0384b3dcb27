"""Published weights on their way to the workers: one unanswered offer a worker, and the newest wins.

    publish -> due -> offered -> answered -> (due again, if there are newer ones) ... -> applied, or refused

A worker that does not answer is offered nothing more: what is published meanwhile costs nothing there, and it gets the
newest once it answers.
"""

from collections.abc import Callable, Collection, Mapping

from cormorant_worker.fleet.bookkeeping.published_weights import PublishedWeights
from cormorant_worker.fleet.bookkeeping.scheduler import Slot
from cormorant_worker.fleet.bookkeeping.worker_handle import WorkerHandle
from cormorant_worker.fleet.events import Events
from cormorant_worker.fleet.stats import Receipt
from cormorant_worker.fleet.transport import Payload
from cormorant_worker.normalize.book import StatisticsBook
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker.messages import Reply, Request


class Offers:
    """Who has which version, and who is to get one. Guarded by the fleet's condition."""

    def __init__(
        self,
        workers: Mapping[Slot, WorkerHandle],
        events: Events,
        *,
        next_number: Callable[[], int],
        statistics: StatisticsBook | None = None,
    ) -> None:
        """Offer nothing yet.

        Args:
            events: hears of versions that were published, applied and refused.
            statistics: of which each version that is published gets the present ones, or its own.
        """
        self.published = PublishedWeights()
        self._workers, self._events = workers, events
        self._next_number = next_number
        self._statistics = statistics
        self._due: dict[Slot, None] = {}
        self._awaited: dict[PolicyVersion, set[Slot]] = {}
        """Workers that have not decided on versions that are waited for."""

    @property
    def has_due(self) -> bool:
        return bool(self._due)

    def publish(
        self,
        blob: WeightsBlob,
        version: PolicyVersion,
        payload: Payload,
        slots: Collection[Slot] | None = None,
    ) -> None:
        """Offer new weights to all workers, or to those of some slots: one copy in memory for all. Workers that come
        later get them, too.

        Args:
            version: higher than any before.
            payload: the same bytes as the engine shares them.
            slots: None: all.
        """
        statistics = None if self._statistics is None else self._statistics.stamp(version, blob.statistics)
        self.published.put(blob, version, slots, payload, statistics)
        self._events.note("published", version=version)
        self._due.update(dict.fromkeys(self._workers if slots is None else slots))

    def send_due(self, most: int) -> int:
        """Offer workers what they do not have, so many at once. Returns how many of them."""
        sent = 0
        while self._due and sent < most:
            slot = next(iter(self._due))
            del self._due[slot]
            handle = self._workers.get(slot)
            if handle is not None and handle.is_ready and not handle.is_leaving:
                sent += self.offer_next(handle)
        return sent

    def offer_next(self, handle: WorkerHandle) -> bool:
        """Offer a worker the oldest of what it should have and was not offered, of each model the newest. Does nothing
        while it has not answered the last one. Returns whether it has something to answer.
        """
        if not handle.takes_weights:
            return False
        if handle.offer:
            return True
        newer = (found for found in self.published.of(handle.slot) if found[0].version > handle.offered)
        if (found := next(newer, None)) is None:
            return False
        published, models = found
        blob = published.blob
        handle.offer, handle.offered = self._next_number(), published.version
        request = Request(
            number=handle.offer,
            action="offer",
            version=published.version,
            size_bytes=blob.size_bytes,
            default_model=blob.default_model,
            models=models,
            statistics=published.statistics,
        )
        handle.request(request, published.payload)
        return True

    def note_reply(self, handle: WorkerHandle, reply: Reply) -> bool:
        """A worker has answered an offer: it gets the next one. Returns whether it has all that it should have."""
        handle.offer = 0
        if reply.error:
            handle.refusal = (handle.offered, reply.error)
            self._decided(handle, up_to=handle.offered)
            self._events.note("refused", worker=handle.name, version=handle.offered, reason=reply.error)
        return not self.offer_next(handle)

    def note_applied(self, handle: WorkerHandle, version: PolicyVersion) -> None:
        """A worker acts with a version from now on."""
        handle.version = version
        self._decided(handle, up_to=version)
        self._events.note("applied", worker=handle.name, version=version)

    # -- waiting for all workers ---------------------------------------------------------------------------------

    def await_version(self, version: PolicyVersion) -> set[Slot]:
        """The workers that have neither taken nor refused a version; kept up to date until `forget_version`."""
        return self._awaited.setdefault(
            version, {m.slot for m in self._workers.values() if self._is_behind(m, version)}
        )

    def forget_version(self, version: PolicyVersion) -> None:
        """It is not waited for any more."""
        self._awaited.pop(version, None)

    def joined(self, handle: WorkerHandle) -> None:
        """A worker begins: it is waited for, too."""
        for version, behind in self._awaited.items():
            if self._is_behind(handle, version):
                behind.add(handle.slot)

    def gone(self, slot: Slot) -> None:
        """This worker is not waited for any more."""
        self._due.pop(slot, None)
        for behind in self._awaited.values():
            behind.discard(slot)

    def _decided(self, handle: WorkerHandle, *, up_to: PolicyVersion) -> None:
        for version, behind in self._awaited.items():
            if version <= up_to:
                behind.discard(handle.slot)

    def _is_behind(self, handle: WorkerHandle, version: PolicyVersion) -> bool:
        is_given = self.published.version_of(handle.slot) >= version
        is_serving = handle.is_ready and not handle.is_leaving and handle.takes_weights
        return is_serving and is_given and handle.version < version and handle.refusal[0] != version

    def receipt(self, version: PolicyVersion) -> Receipt:
        serving = (h for h in self._workers.values() if h.is_ready and not h.is_leaving and h.takes_weights)
        given = sorted((h for h in serving if self.published.version_of(h.slot) >= version), key=lambda h: h.name)
        behind = [h for h in given if h.version < version]
        return Receipt(
            version=version,
            applied=tuple(h.name for h in given if h.version >= version),
            waiting=tuple(h.name for h in behind if h.refusal[0] != version),
            refused={h.name: h.refusal[1] for h in behind if h.refusal[0] == version},
        )
