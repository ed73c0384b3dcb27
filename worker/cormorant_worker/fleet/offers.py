"""Published weights: the newest of each model, and the version of each worker.

    publish -> due -> offered -> answered -> (due again, if there are newer ones) ... -> applied, or refused

A worker has at most one unanswered offer. Until it answers, further publishes are skipped for it; then it gets the
newest.
"""

from collections.abc import Collection
from dataclasses import dataclass

import structlog

from cormorant_contract.policy import Policy
from cormorant_worker.errors import StaleWeights
from cormorant_worker.fleet.events import Events
from cormorant_worker.fleet.slot import Slot, WorkerHandle
from cormorant_worker.fleet.slots import Slots
from cormorant_worker.fleet.stats import WorkerReceipts
from cormorant_worker.fleet.transport import Payload
from cormorant_worker.normalize import Statistics, StatisticsBook
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.cached import Offer
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion, Weights
from cormorant_worker.worker.messages import Reply

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class PublishedVersion:
    version: PolicyVersion
    blob: WeightsBlob
    payload: Payload
    """The same bytes as the engine shares them."""
    statistics: Statistics | None = None
    """Normalization statistics; None unless the manifest normalizes."""


class Offers:
    """Weights published for all workers and for single slots, which those for all replace. Guarded by the fleet's
    condition.
    """

    def __init__(
        self, slots: Slots, events: Events, *, policy: Policy, statistics: StatisticsBook | None = None
    ) -> None:
        self.version = INITIAL_VERSION
        """The highest number that was given out."""
        self.common_version = INITIAL_VERSION
        """The newest that all workers were given: what staleness is measured by."""
        self._common: dict[str, PublishedVersion] = {}
        """The newest for all, by model."""
        self._past: dict[PolicyVersion, PublishedVersion] = {}
        """Versions for all, ascending, that groups of agents may still play."""
        self._policy = policy
        self._own: dict[Slot, dict[str, PublishedVersion]] = {}
        self._slots, self._events = slots, events
        self._statistics = statistics
        """Each version that is published gets the present ones, or its own."""
        self._due: dict[WorkerHandle, None] = {}
        """Workers that may not have been offered the newest."""

    # -- what was published ------------------------------------------------------------------------------------

    def publish(
        self, blob: WeightsBlob, wanted: int | None, payload: Payload, slots: Collection[Slot] | None = None
    ) -> PolicyVersion:
        """Offer new weights to all workers, or to those of some slots, and to later ones: one copy in memory for all.
        Releases versions that are no longer the newest of any model. `wanted`: the version; None: one more than the
        last. Raises StaleWeights where it is not higher than the last.
        """
        version = PolicyVersion(self.version + 1 if wanted is None else wanted)
        if version <= self.version:
            raise StaleWeights(f"weights version {version} is not newer than {self.version}; publish a higher one")
        statistics = None if self._statistics is None else self._statistics.stamp(version, blob.statistics)
        published = PublishedVersion(version, blob, payload, statistics)
        newest = dict.fromkeys(blob.tensors, published)
        self.version = version
        if slots is None:
            self.common_version = version
            self._common.update(newest)
            past = {**self._past, version: published}
            kept = set[int]()
            for model in self._common:
                having = [number for number, one in past.items() if model in one.blob.tensors]
                kept |= self._policy.versions_kept(model, having)
            self._past = {number: one for number, one in past.items() if number in kept}
            for own in self._own.values():
                for model in newest:
                    own.pop(model, None)
        else:
            for slot in slots:
                self._own.setdefault(slot, {}).update(newest)
        self._events.note("published", version=version)
        workers = self._slots.workers if slots is None else (slot.worker for slot in slots)
        self._due |= {worker: None for worker in workers if worker is not None}
        return version

    def version_of(self, slot: Slot) -> PolicyVersion:
        """Newest version offered to a slot's worker."""
        own = self._own.get(slot, {}).values()
        return max([self.common_version, *(one.version for one in own)])

    def published(self) -> dict[PolicyVersion, Weights]:
        """Weights published for all, oldest first: the newest of each model in one, or each version that groups may
        play. They are views of memory that does not change.
        """
        if self._policy.agents is not None:
            played = {**self._past, **{one.version: one for one in self._common.values()}}
            return {version: one.blob.weights() for version, one in sorted(played.items())}
        newest = {model: one.blob.weights()[model] for model, one in self._common.items()}
        return {self.version: newest} if newest else {}

    def clear(self) -> None:
        self._common.clear()
        self._past.clear()
        self._own.clear()

    # -- who is to get it --------------------------------------------------------------------------------------

    def send_due(self, most: int) -> bool:
        """Offer workers the weights that they lack, to a limited number at once. Returns whether there are more."""
        sent = 0
        while self._due and sent < most:
            handle = next(iter(self._due))
            del self._due[handle]
            sent += self.offer_next(handle)
        return bool(self._due)

    def offer_next(self, handle: WorkerHandle) -> bool:
        """Offer a worker the oldest of the weights that it lacks (the newest of each model, and those that groups of
        agents may still play), unless it has not answered the last offer. Returns whether an answer is pending.
        """
        if not handle.may_be_offered:
            return False
        if handle.offer:
            return True
        newest = {**self._common, **self._own.get(handle.slot, {})}
        newer = [one for one in (*newest.values(), *self._past.values()) if one.version > handle.offered]
        if not newer:
            return False
        published = min(newer, key=lambda one: one.version)
        handle.offered = published.version
        offer = Offer(
            version=published.version,
            default_model=published.blob.default_model,
            models=tuple(
                model
                for model in published.blob.tensors
                if newest.get(model) is published or published.version in self._past
            ),
            statistics=published.statistics,
        )
        handle.offer = handle.ask(offer, published.payload)
        return True

    def note_reply(self, handle: WorkerHandle, reply: Reply) -> bool:
        """Record a worker's answer and send the next offer. Returns whether the worker has all its weights."""
        handle.offer = None
        if reply.error:
            handle.refusal = (handle.offered, reply.error)
            log.warning("weights_refused", worker=handle.name, version=handle.offered, reason=reply.error)
            self._events.note("refused", worker=handle.name, version=handle.offered, reason=reply.error)
        else:
            handle.accepted = handle.offered
        return not self.offer_next(handle)

    def is_decided(self, version: PolicyVersion, behind: list[WorkerHandle]) -> bool:
        """Every worker has applied or refused a version. `behind`: one list, empty at first, of workers still to be
        checked.
        """
        while behind and not self._is_behind(behind[-1], version):
            behind.pop()
        if not behind:  # workers that joined meanwhile are waited for, too
            behind += [handle for handle in self._slots.workers if self._is_behind(handle, version)]
        return not behind

    def _is_behind(self, handle: WorkerHandle, version: PolicyVersion) -> bool:
        is_given = handle.gets_weights and self.version_of(handle.slot) >= version
        return is_given and handle.version < version and not handle.has_refused(version)

    def receipt(self, version: PolicyVersion) -> WorkerReceipts:
        acting = (h for h in self._slots.workers if h.gets_weights)
        given = sorted((h for h in acting if self.version_of(h.slot) >= version), key=lambda h: h.name)
        behind = [h for h in given if h.version < version]
        return WorkerReceipts(
            version=version,
            applied=tuple(h.name for h in given if h.version >= version),
            waiting=tuple(h.name for h in behind if not h.has_refused(version)),
            refused={h.name: h.refusal[1] for h in behind if h.has_refused(version)},
        )
