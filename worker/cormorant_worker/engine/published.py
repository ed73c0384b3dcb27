"""Weights on their way to the workers: kept by the crew for those that come later."""

from dataclasses import dataclass

from cormorant_worker.engine.link import Payload
from cormorant_worker.weights import PolicyVersion
from cormorant_worker.weights_blob import WeightsBlob


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """One publish."""

    version: PolicyVersion
    blob: WeightsBlob
    payload: Payload
    """The same bytes as the engine shares them."""
