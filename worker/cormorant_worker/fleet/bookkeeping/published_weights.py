"""The newest weights of each model, kept for workers that come later.

What is published for all workers takes the place of what single workers had of the same models.
"""

from collections.abc import Collection
from dataclasses import dataclass

from cormorant_worker.fleet.bookkeeping.scheduler import Slot
from cormorant_worker.fleet.transport import Payload
from cormorant_worker.normalize.moments import Statistics
from cormorant_worker.weights.blob import WeightsBlob
from cormorant_worker.weights.file import to_bytes
from cormorant_worker.weights.staged import INITIAL_VERSION, PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class PublishedVersion:
    version: PolicyVersion
    blob: WeightsBlob
    payload: Payload
    """The same bytes as the engine shares them."""
    statistics: Statistics | None = None
    """What it acts with; None where the manifest normalises nothing."""

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.blob.tensors)


class PublishedWeights:
    """For all workers, and for single slots. Guarded by the fleet's condition."""

    def __init__(self) -> None:
        self.version = INITIAL_VERSION
        """The highest number that was given out."""
        self.common_version = INITIAL_VERSION
        """The newest that all workers were given: what staleness is measured by."""
        self._common: dict[str, PublishedVersion] = {}
        self._own: dict[Slot, dict[str, PublishedVersion]] = {}

    def put(
        self,
        blob: WeightsBlob,
        version: PolicyVersion,
        slots: Collection[Slot] | None,
        payload: Payload,
        statistics: Statistics | None = None,
    ) -> PublishedVersion:
        """Keep new weights, for all slots or for some, and let go of those that are the newest of nothing any more."""
        before = self._kept()
        found = PublishedVersion(version, blob, payload, statistics)
        self.version = version
        if slots is None:
            self.common_version = version
            self._common.update(dict.fromkeys(found.models, found))
            for own in self._own.values():
                for model in found.models:
                    own.pop(model, None)
        else:
            for slot in slots:
                self._own.setdefault(slot, {}).update(dict.fromkeys(found.models, found))
        for older in before - self._kept():
            older.payload.close()
        return found

    def has(self, payload: Payload) -> bool:
        """Whether a worker may still be offered these bytes."""
        return any(one.payload is payload for one in self._kept())

    def of(self, slot: Slot) -> list[tuple[PublishedVersion, tuple[str, ...]]]:
        """What a place's worker is to have, oldest first, each with the models that it is the newest of."""
        newest = {**self._common, **self._own.get(slot, {})}
        found = sorted(set(newest.values()), key=lambda one: one.version)
        return [(one, tuple(model for model, holder in newest.items() if holder is one)) for one in found]

    def version_of(self, slot: Slot) -> PolicyVersion:
        """The newest version that a place's worker was given."""
        own = self._own.get(slot, {}).values()
        return max([self.common_version, *(one.version for one in own)])

    def to_bytes(self) -> bytes:
        """Safetensors of what all workers have; empty when nothing was published."""
        newest = {model: one.blob.weights()[model] for model, one in self._common.items()}
        return to_bytes(newest) if newest else b""

    def clear(self) -> None:
        for one in self._kept():
            one.payload.close()
        self._common.clear()
        self._own.clear()

    def _kept(self) -> set[PublishedVersion]:
        return {*self._common.values(), *(one for own in self._own.values() for one in own.values())}
