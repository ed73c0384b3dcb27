"""Takes a published version into what acts in this process: a worker's collector, or an inference server's policy."""

import threading

from cormorant_worker.weights.blob import read_weights
from cormorant_worker.weights.cached import CachedWeights
from cormorant_worker.weights.staged import PolicyVersion, StagedWeights
from cormorant_worker.worker.messages import Offer

_MOMENT_S = 0.01


def take_offer(
    weights: StagedWeights, offer: Offer, payload: memoryview, *, boundary: threading.Lock, kept: CachedWeights
) -> None:
    """Stage a publish, let it act if that can be now, and keep it for a new head. `boundary`: held by the thread that
    acts, within a batch or while it acts for rows.
    """
    version = PolicyVersion(offer.version)
    try:
        offered = read_weights(payload, default_model=offer.default_model, models=offer.models)
        weights.offer(offered, version=version, statistics=offer.statistics)
    finally:
        weights.note_seen(version)  # refused or not: a ticket that came with it goes on
    # Who waits for a ticket, or for rows, need not get one to let new weights act. Otherwise the thread that acts will
    # see them when it is done; outside it holds the lock for a moment only.
    if boundary.acquire(timeout=_MOMENT_S):
        try:
            weights.apply()
        finally:
            boundary.release()
    kept.keep(
        payload,
        version=version,
        default_model=offer.default_model,
        models=tuple(offered),
        statistics=offer.statistics,
    )
