"""How fast a batch that lies ready in a worker process becomes the consumer's own, against memcpy of the same bytes.

One worker fills the queue with Pong batches (64 environments, 32 steps: 58 MB of pixels, twice that with `next`). Then
the fleet is paused and the consumer takes them: as views of shared memory, valid until the next take, and as copies.
"""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

from benchmarks.micro import rows
from benchmarks.ours import make_job, open_local_fleet
from benchmarks.workloads import WORKLOADS
from cormorant_contract.job import CollectorJob
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.local_fleet import LocalFleet

WORKLOAD = WORKLOADS["random-pong-64"]
FILL_TIMEOUT_S = 120.0
TAKES = 3
"""One less than the queue holds."""


def measure(*, quick: bool) -> Sequence[dict]:
    job = CollectorJob.model_validate(_document())
    with open_local_fleet(job, workers=1) as fleet:
        size_bytes = _leaf_bytes(LocalFleet(fleet).next_batch(copy=True))
        ratios, view_s = [], []
        for _ in range(2 if quick else 7):
            memcpy_s = _memcpy_seconds(size_bytes)
            view_s += _take_ready(fleet, copy=False)
            ratios += [memcpy_s / seconds for seconds in _take_ready(fleet, copy=True)]
    note = f"{size_bytes / 1e6:.0f} MB"
    return [
        rows.row("hand-over of a batch as a copy, over memcpy", median(ratios), "x", bar=">= 0.75", note=note),
        rows.row("hand-over of a batch as a view", 1e3 * median(view_s), "ms", note=note),
    ]


def _document() -> dict:
    document = make_job(WORKLOAD, workers=1).to_document()
    document["spec"]["output"] = {"queue": {"capacityBatches": TAKES + 1}}
    return document


def _take_ready(fleet: WorkerFleet, *, copy: bool) -> list[float]:
    """Seconds of each take while the queue is full and the worker holds still."""
    fleet.resume()
    deadline = time.monotonic() + FILL_TIMEOUT_S
    while fleet.stats().queued_batches <= TAKES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the queue was not full within {FILL_TIMEOUT_S} s: {fleet.stats()}")
        time.sleep(0.02)
    fleet.pause()
    reader = LocalFleet(fleet)
    return [_take_seconds(reader, copy=copy) for _ in range(TAKES)]


def _take_seconds(reader: LocalFleet, *, copy: bool) -> float:
    start = time.perf_counter()
    batch = reader.next_batch(copy=copy)
    seconds = time.perf_counter() - start
    del batch
    return seconds


def _memcpy_seconds(size_bytes: int) -> float:
    """As a consumer copies: from memory that is not in the cache into memory that is fresh."""
    source = np.ones(size_bytes, np.uint8)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        source.copy()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _leaf_bytes(tensordict: object) -> int:
    """Bytes that the consumer gets, derived `next` observations included."""
    leaves: list[torch.Tensor] = list(tensordict.values(include_nested=True, leaves_only=True))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


if __name__ == "__main__":
    rows.main(measure)
