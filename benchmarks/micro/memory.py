"""Memory of a whole collection (this process and its workers) after n and after 10 n batches that are not kept.

Proportional set size: pages shared between processes count once.
"""

import argparse
from collections.abc import Sequence

import psutil

from benchmarks import protocol
from benchmarks.micro import rows
from benchmarks.ours import make_job, open_ours
from benchmarks.workloads import WORKLOADS

WORKERS = (0, 2)
"""0 = one collector in this process."""


def measure(*, quick: bool) -> Sequence[dict]:
    first = 5 if quick else 50
    found = []
    for workers in WORKERS:
        with open_ours(WORKLOADS["cartpole-64"], argparse.Namespace(workers=workers)) as take:
            found += _grow(take, workers, first)
    return found


def _grow(take: protocol.Take, workers: int, first: int) -> list[dict]:
    for _ in range(first):
        take()
    early = proportional_bytes()
    for _ in range(9 * first):
        take()
    late = proportional_bytes()
    who = f"{workers} workers" if workers else "in process"
    batch_mb = _batch_bytes(workers) / 1e6
    return [
        rows.row(
            f"memory, {who}, after {10 * first} batches each",
            late / 1e6,
            "MB",
            note=f"a block has {batch_mb:.2f} MB",
        ),
        rows.row(
            f"memory, {who}, growth from {first} to {10 * first} batches", (late - early) / 1e6, "MB", bar="about 0"
        ),
    ]


def proportional_bytes() -> int:
    """PSS of this process and all its descendants."""
    here = psutil.Process()
    return sum(process.memory_full_info().pss for process in (here, *here.children(recursive=True)))


def _batch_bytes(workers: int) -> int:
    """What one block of a worker needs, observations dominating: 4 float32 a CartPole frame, and the scalars."""
    frames = make_job(WORKLOADS["cartpole-64"], workers=max(1, workers)).spec.collection.frames_per_batch
    return frames * (4 * 4 + 8 + 4 + 2 + 8 + 8)


if __name__ == "__main__":
    rows.main(measure)
