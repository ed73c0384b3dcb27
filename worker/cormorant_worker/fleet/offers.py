"""Weights on their way from the shelf to the workers: one unanswered offer a worker, and the newest wins.

    publish -> due -> offered -> answered -> (due again, if there are newer ones) ... -> applied, or refused

A worker that does not answer is offered nothing more: what is published meanwhile costs nothing there, and it gets the
newest once it answers.
"""

from collections.abc import Callable, Collection, Mapping

from cormorant_worker.fleet.events import Events
from cormorant_worker.fleet.published_weights import PublishedWeights
from cormorant_worker.fleet.scheduler import Slot
from cormorant_worker.fleet.worker_handle import WorkerHandle
from cormorant_worker.weights.staged import PolicyVersion
from cormorant_worker.worker.messages import Reply, Request


class Offers:
    """Who has which version, and who is to get one. Guarded by the fleet's condition."""

    def __init__(
        self,
        shelf: PublishedWeights,
        members: Mapping[Slot, WorkerHandle],
        events: Events,
        *,
        next_number: Callable[[], int],
    ) -> None:
        """Offer nothing yet.

        Args:
            shelf: what was published.
            members: the workers that live.
            events: hears of versions that were applied and refused.
            next_number: numbers requests.
        """
        self._shelf, self._members, self._events = shelf, members, events
        self._next_number = next_number
        self._due: dict[Slot, None] = {}
        self._awaited: dict[PolicyVersion, set[Slot]] = {}
        """Workers that have not decided on versions that somebody waits for."""

    @property
    def has_due(self) -> bool:
        """Whether `send_due` has something to do."""
        return bool(self._due)

    def note_published(self, slots: Collection[Slot] | None) -> None:
        """There is something newer, for everybody or for some places."""
        self._due.update(dict.fromkeys(self._members if slots is None else slots))

    def send_due(self, most: int) -> int:
        """Offer workers what they do not have, so many at once. Returns how many of them."""
        sent = 0
        while self._due and sent < most:
            slot = next(iter(self._due))
            del self._due[slot]
            member = self._members.get(slot)
            if member is not None and member.is_ready and not member.is_leaving:
                sent += self.offer_next(member)
        return sent

    def offer_next(self, member: WorkerHandle) -> bool:
        """Offer a worker the oldest of what it is to have and was not offered, of each model the newest. Does nothing
        while it has not answered the last one. Returns whether it has something to answer.
        """
        if member.offer:
            return True
        newer = (found for found in self._shelf.of(member.place) if found[0].version > member.offered)
        if (found := next(newer, None)) is None:
            return False
        published, models = found
        blob = published.blob
        member.offer, member.offered = self._next_number(), published.version
        request = Request(
            number=member.offer,
            action="offer",
            version=published.version,
            size_bytes=blob.size_bytes,
            default_model=blob.default_model,
            models=models,
        )
        member.request(request, published.payload)
        return True

    def note_reply(self, member: WorkerHandle, reply: Reply) -> bool:
        """A worker has answered an offer: it gets the next one. Returns whether it has all that it is to have."""
        member.offer = 0
        if reply.error:
            member.refusal = (member.offered, reply.error)
            self._decided(member, up_to=member.offered)
            self._events.note("refused", worker=member.name, version=member.offered, reason=reply.error)
        return not self.offer_next(member)

    def note_applied(self, member: WorkerHandle, version: PolicyVersion) -> None:
        """A worker acts with a version from now on."""
        member.version = version
        self._decided(member, up_to=version)
        self._events.note("applied", worker=member.name, version=version)

    # -- waiting for everybody ---------------------------------------------------------------------------------

    def await_version(self, version: PolicyVersion) -> set[Slot]:
        """The workers that have neither taken nor refused a version; kept up to date until `forget_version`."""
        return self._awaited.setdefault(
            version, {m.place for m in self._members.values() if self._is_behind(m, version)}
        )

    def forget_version(self, version: PolicyVersion) -> None:
        """Nobody waits for it any more."""
        self._awaited.pop(version, None)

    def note_joined(self, member: WorkerHandle) -> None:
        """A worker begins: it is waited for, too."""
        for version, behind in self._awaited.items():
            if self._is_behind(member, version):
                behind.add(member.place)

    def note_gone(self, slot: Slot) -> None:
        """Nobody waits for this worker any more."""
        self._due.pop(slot, None)
        for behind in self._awaited.values():
            behind.discard(slot)

    def _decided(self, member: WorkerHandle, *, up_to: PolicyVersion) -> None:
        for version, behind in self._awaited.items():
            if version <= up_to:
                behind.discard(member.place)

    def _is_behind(self, member: WorkerHandle, version: PolicyVersion) -> bool:
        is_given = self._shelf.version_of(member.place) >= version
        is_serving = member.is_ready and not member.is_leaving
        return is_serving and is_given and member.version < version and member.refusal[0] != version
