"""Joins the frames of a dataset into trajectories, over batches and shards. Called by exports and by scripts.

# n frames of a stretch
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from cormorant_worker.errors import DatasetCorrupt
from cormorant_worker.sinks.dataset import DatasetPart, StoredDataset, split_part_name
from cormorant_worker.sinks.frames import Frames
from cormorant_worker.sinks.schema import FrameSchema
from cormorant_worker.spaces import Array, Arrays

_LEAVES = ("action", "outputs", "info", "tasks")
_PLAIN = ("reward", "terminated", "truncated", "policy_version")
_Ending = Literal["ended", "cut", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive frames of one trajectory."""

    part: str
    """The worker attempt, `<group>-<index>-<attempt>`."""
    env: int
    """The environment's column in that attempt."""
    traj_id: int
    first_step: int
    """Number of the first frame within its trajectory."""
    ending: _Ending
    """ended: the last frame is terminated or truncated. cut: the dataset has no more of it (the job ended, the
    worker or its environment died). open: its next stretch follows."""
    observation: Arrays
    """[n+1, ...] a leaf, with the true final observation at the end."""
    states: Arrays
    """[n+1, ...] each recurrent state."""
    action: Arrays
    """[n, ...] a leaf."""
    outputs: Arrays
    info: Arrays
    tasks: Arrays
    reward: Array
    """[n] float32."""
    terminated: Array
    """[n] bool."""
    truncated: Array
    policy_version: Array
    """[n] int64."""

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def size_bytes(self) -> int:
        """Memory of the observations, which is nearly all."""
        return sum(values.nbytes for values in self.observation)

    def leads_to(self, piece: "Stretch") -> bool:
        return self.traj_id == piece.traj_id and self.first_step + len(self) == piece.first_step

    def frames(self, schema: FrameSchema) -> Frames:
        """Its frames, in order; `schema` is the one it was read with."""
        count = len(self)
        return Frames(
            schema=schema,
            part=self.part,
            observation=tuple(values[:-1] for values in self.observation),
            states=tuple(values[:-1] for values in self.states),
            **{name: getattr(self, name) for name in (*_LEAVES, *_PLAIN)},
            traj_id=np.full(count, self.traj_id),
            step=np.arange(self.first_step, self.first_step + count, dtype=np.int32),
            env=np.full(count, self.env, dtype=np.int32),
            is_init=np.arange(self.first_step, self.first_step + count) == 0,
            next_rows=np.array([count - 1]),
            next_observation=tuple(values[-1:] for values in self.observation),
            next_states=tuple(values[-1:] for values in self.states),
        )


def iter_stretches(
    dataset: StoredDataset,
    *,
    parts: Sequence[DatasetPart] | None = None,
    schema: FrameSchema | None = None,
    max_bytes: float = math.inf,
) -> Iterator[Stretch]:
    """Every trajectory of a dataset, slot by slot, in the order in which they ended; what was cut comes last. One that
    a later attempt of its worker went on with is one. A trajectory that does not fit comes in several stretches.

    Args:
        dataset: what to read.
        parts: those of its parts to read; None: all.
        schema: the leaves to read; None: all.
        max_bytes: when more than this is held, what is held is given out as open stretches. The memory taken is
            about this, and two batches. Infinite: every trajectory comes whole.

    Raises:
        DatasetCorrupt: a shard is missing or cannot be read.
    """
    slots = itertools.groupby(dataset.parts() if parts is None else parts, lambda part: split_part_name(part.name)[:2])
    for _, attempts in slots:
        held: dict[int, list[Stretch]] = {}
        held_bytes = 0
        for frames in itertools.chain.from_iterable(dataset.iter_frames(part, schema) for part in attempts):
            for piece in _pieces(frames):
                pieces = held.setdefault(piece.env, [])
                if pieces and not pieces[-1].leads_to(piece):
                    held_bytes -= sum(p.size_bytes for p in pieces)
                    yield _join(pieces, "cut")
                    pieces.clear()
                pieces.append(piece)
                held_bytes += piece.size_bytes
                if piece.ending == "ended":
                    held_bytes -= sum(p.size_bytes for p in pieces)
                    yield _join(held.pop(piece.env), "ended")
            if held_bytes > max_bytes:
                # The last piece stays: whether its trajectory goes on is not known before the next batch.
                for pieces in held.values():
                    if len(pieces) > 1:
                        yield _join(pieces[:-1], "open")
                        del pieces[:-1]
                held_bytes = sum(p.size_bytes for pieces in held.values() for p in pieces)
        for pieces in held.values():
            yield _join(pieces, "cut")


def _pieces(frames: Frames) -> Iterator[Stretch]:
    """One batch's frames by trajectory, copied, in the order of their last rows."""
    order, starts = frames.runs()
    for rows in sorted(np.split(order, starts[1:]), key=lambda run: int(run[-1])):
        last = int(rows[-1])
        at = int(np.searchsorted(frames.next_rows, last))
        if at == len(frames.next_rows) or frames.next_rows[at] != last:
            raise DatasetCorrupt(
                f"{frames.part}: the observation after frame {last} of a batch is missing; "
                "run `cormorant dataset verify`"
            )
        columns: dict[str, Any] = {name: tuple(a[rows] for a in getattr(frames, name)) for name in _LEAVES}
        columns |= {name: getattr(frames, name)[rows] for name in _PLAIN}
        yield Stretch(
            part=frames.part,
            env=int(frames.env[last]),
            traj_id=int(frames.traj_id[last]),
            first_step=int(frames.step[rows[0]]),
            ending="ended" if frames.terminated[last] or frames.truncated[last] else "open",
            observation=_with_last(frames.observation, frames.next_observation, rows, at),
            states=_with_last(frames.states, frames.next_states, rows, at),
            **columns,
        )


def _with_last(carried: Arrays, following: Arrays, rows: Array, at: int) -> Arrays:
    return tuple(np.concatenate([a[rows], b[at : at + 1]]) for a, b in zip(carried, following, strict=True))


def _join(pieces: Sequence[Stretch], ending: _Ending) -> Stretch:
    def series(name: str) -> list[Any]:
        return [getattr(piece, name) for piece in pieces]

    def carried(leaves: list[Arrays]) -> Arrays:
        # A piece ends with what the next one begins with.
        return tuple(
            np.concatenate([*(values[:-1] for values in series[:-1]), series[-1]])
            for series in zip(*leaves, strict=True)
        )

    if len(pieces) == 1:
        return replace(pieces[0], ending=ending)
    joined: dict[str, Any] = {name: carried(series(name)) for name in ("observation", "states")}
    joined |= {name: tuple(map(np.concatenate, zip(*series(name), strict=True))) for name in _LEAVES}
    joined |= {name: np.concatenate(series(name)) for name in _PLAIN}
    return replace(pieces[0], ending=ending, **joined)
