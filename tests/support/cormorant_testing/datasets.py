"""Frames of a dataset."""

from collections.abc import Iterator

from cormorant_worker.sinks.dataset import Dataset
from cormorant_worker.sinks.frames import Frames


def iter_frames(dataset: Dataset) -> Iterator[Frames]:
    """Every durable frame: parts in order, each part's batches as they were collected."""
    for part in dataset.parts():
        yield from dataset.iter_frames(part)
