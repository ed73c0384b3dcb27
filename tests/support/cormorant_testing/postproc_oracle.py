"""Batches of known trajectories, and what post-processing makes of them, in plain Python: loops, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import TensorDict


@dataclass(frozen=True)
class Frame:
    """One frame of a row. Observations are numbers, so that a wrong one is seen."""

    traj: int
    observation: float
    following: float
    reward: float
    terminated: bool
    truncated: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


Row = list[Frame]


@st.composite
def rows(draw: Any, *, max_rows: int = 4, max_steps: int = 12, padded: bool = True) -> list[Row]:
    """Rows of frames: trajectories of any lengths, ends of any kind, the last one open or ended."""
    steps = draw(st.integers(1, max_steps))
    found: list[Row] = []
    traj = draw(st.integers(0, 5))
    for number in range(draw(st.integers(1, max_rows))):
        length = draw(st.integers(0, steps)) if padded and number else steps
        row: Row = []
        while len(row) < length:
            piece = draw(st.integers(1, length - len(row)))
            ends = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
            is_open = len(row) + piece == length and draw(st.booleans())
            for i in range(piece):
                flags = (False, False) if is_open or i < piece - 1 else ends
                value = 1000.0 * traj + i
                reward = float(draw(st.integers(-8, 8)))
                row.append(Frame(traj, value, value + (0.5 if any(flags) else 1.0), reward, *flags))
            traj += draw(st.integers(1, 3))
        found.append(row)
    return found


def to_batch(found: Sequence[Row], *, feature: bool = True, time_major: bool = True) -> TensorDict:
    """A batch `[B, T]`, masked when rows differ in length; views of time-major memory, as collectors make."""
    steps = max(len(row) for row in found)

    def leaf(name: str, dtype: torch.dtype, *, wide: bool = False) -> torch.Tensor:
        value = torch.zeros(len(found), steps, dtype=dtype)
        for b, row in enumerate(found):
            for t, frame in enumerate(row):
                value[b, t] = getattr(frame, name)
        value = value.t().contiguous().t() if time_major else value
        return value.unsqueeze(-1) if wide else value

    observation = leaf("observation", torch.float32)
    batch = {
        "observation": torch.stack([observation, -observation], -1),
        "next": {
            "observation": torch.stack([leaf("following", torch.float32), -leaf("following", torch.float32)], -1),
            **{name: leaf(name, torch.bool, wide=feature) for name in ("done", "terminated", "truncated")},
            "reward": leaf("reward", torch.float64, wide=feature),
        },
        "collector": {"traj_ids": leaf("traj", torch.int64)},
    }
    made = TensorDict(batch, batch_size=[len(found), steps], names=[None, "time"])
    if any(len(row) < steps for row in found):
        mask = torch.zeros(len(found), steps, dtype=torch.bool)
        for b, row in enumerate(found):
            mask[b, : len(row)] = True
        made["collector", "mask"] = mask
    return made


def pieces(found: Sequence[Row]) -> list[list[tuple[int, int]]]:
    """(row, step) of every frame, one list a piece, in the order of rows and time."""
    made: list[list[tuple[int, int]]] = []
    for b, row in enumerate(found):
        for t, frame in enumerate(row):
            if t == 0 or row[t - 1].traj != frame.traj:
                made.append([])
            made[-1].append((b, t))
    return made


def look_ahead(row: Row, t: int, n: int) -> int:
    """k: how many frames, frame t included, a target of n steps takes."""
    k = 1
    while k < n and t + k < len(row) and not row[t + k - 1].done:
        k += 1
    return k
