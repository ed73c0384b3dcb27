"""Joins the frames of a dataset into trajectories, over batches and shards. Called by exports and by scripts."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cormorant_worker.errors import DatasetCorrupt
from cormorant_worker.sinks.dataset import DatasetPart, StoredDataset, split_part_name
from cormorant_worker.sinks.frames import Frames
from cormorant_worker.sinks.schema import KINDS, FrameSchema


def iter_trajectories(
    dataset: StoredDataset, *, parts: Sequence[DatasetPart] | None = None, schema: FrameSchema | None = None
) -> Iterator[Frames]:
    """Every trajectory of a dataset, or of some parts and leaves of it, whole, slot by slot, in the order in which they
    ended; cut ones last. A trajectory that a later attempt of its worker continued is one trajectory, under the name of
    the first part. `next` is stored only after the last frame. Holds the open trajectories of one worker.
    """
    slots = itertools.groupby(dataset.parts() if parts is None else parts, lambda part: split_part_name(part.name)[:2])
    for _, attempts in slots:
        held: dict[int, list[Frames]] = {}
        for frames in itertools.chain.from_iterable(dataset.iter_frames(part, schema) for part in attempts):
            for piece in _pieces(frames):
                pieces = held.setdefault(int(piece.env[0]), [])
                if pieces:
                    last = pieces[-1]
                    if last.traj_id[-1] != piece.traj_id[0] or last.step[-1] + 1 != piece.step[0]:
                        yield _join(pieces)
                        pieces.clear()
                pieces.append(piece)
                if not piece.is_cut:
                    yield _join(held.pop(int(piece.env[0])))
        yield from map(_join, held.values())


def _pieces(frames: Frames) -> Iterator[Frames]:
    """One batch's frames by trajectory, copied, in the order of their last rows."""
    for rows in sorted(frames.runs(), key=lambda run: int(run[-1])):
        at = np.flatnonzero(frames.next_rows == rows[-1])
        if not len(at):
            raise DatasetCorrupt(
                f"{frames.part}: the observation after frame {rows[-1]} of a batch is missing; "
                "run `cormorant dataset verify`"
            )
        columns: dict[str, Any] = {name: tuple(a[rows] for a in getattr(frames, name)) for name in KINDS.values()}
        columns |= {name: getattr(frames, name)[rows] for name, _ in frames.schema.plain}
        yield replace(
            frames,
            **columns,
            next_rows=np.array([len(rows) - 1]),
            next_observation=tuple(values[at] for values in frames.next_observation),
            next_states=tuple(values[at] for values in frames.next_states),
        )


def _join(pieces: Sequence[Frames]) -> Frames:
    if len(pieces) == 1:
        return pieces[0]
    columns: dict[str, Any] = {}
    for name in KINDS.values():
        leaves = zip(*(getattr(piece, name) for piece in pieces), strict=True)
        columns[name] = tuple(np.concatenate(series) for series in leaves)
    for name, _ in pieces[0].schema.plain:
        columns[name] = np.concatenate([getattr(piece, name) for piece in pieces])
    last = pieces[-1]
    return replace(
        pieces[0],
        **columns,
        next_rows=np.array([sum(map(len, pieces)) - 1]),
        next_observation=last.next_observation,
        next_states=last.next_states,
    )
