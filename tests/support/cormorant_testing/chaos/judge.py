"""Judges every frame that a fleet of `witness` environments delivers: each by itself at once, all together at the end.

Nothing here knows how trajectory ids or seeds are made, only what is promised of them: an id stands for one stretch of
one episode, for all time, and no seed's stream is collected twice.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cormorant_testing.chaos.witness import BORN, ECHO, EPISODE, LIFE, SEED, STEP, length_of, reward_of
from cormorant_worker.spaces import Array


class Finding(AssertionError):
    """Something that must never happen did."""


@dataclass
class Judge:
    """Thread-safe."""

    resets: bool = False
    """resetAtEachBatch."""
    may_miss: bool = False
    """Frames of a trajectory may be missing: drop_oldest, staleness, a restored state, a head that was killed."""
    frames: int = 0
    newest: int = -1
    """The highest version that acted."""
    _kept: list[dict[str, Array]] = field(default_factory=list)
    _bodies: dict[str, dict[str, Array]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nested: Mapping[str, Any], *, batch_id: str = "") -> dict[str, Array]:
        """Judge one batch `[B, T]` frame by frame, and keep what the end needs: a TensorDict, or nested mappings of
        arrays. `batch_id`: of a head, which may deliver it again with the same values. Returns a copy of its frames.
        """
        frames = extract(nested)
        where = f"batch {batch_id or len(self._kept)}"
        self._check_frames(frames, where)
        with self._lock:
            if batch_id and (known := self._bodies.get(batch_id)) is not None:
                compare(known, frames, f"{where} was delivered again")
                return frames
            if batch_id:
                self._bodies[batch_id] = frames
            self._kept.append(frames)
            self.frames += len(frames["traj"])
            self.newest = max(self.newest, int(frames["version"].max(initial=-1)))
        return frames

    def _check_frames(self, f: dict[str, Array], where: str) -> None:
        seed, episode, step = (f["obs"][:, i].astype(np.int64) for i in (SEED, EPISODE, STEP))
        is_over = step + 1 >= length_of(seed, episode)
        is_even = episode % 2 == 0
        echoed = f["action"][:, 0].astype(np.float64) + 2 * f["action"][:, 1].astype(np.float64)
        reached = f["obs"].copy()
        reached[:, STEP] += 1
        reached[:, ECHO] = echoed
        # What a restored environment had shown before it was saved, it showed in the life before.
        is_restored = f["next"][:, BORN] == 1
        reached[is_restored, LIFE], reached[is_restored, BORN] = f["next"][is_restored, LIFE], 1
        is_cut = f["is_last"] & ~is_over if self.resets else np.zeros_like(is_over)
        for name, found, expected in (
            ("next observation", f["next"], reached),
            ("reward", f["reward"], reward_of(episode, step + 1)),
            ("terminated", f["terminated"], is_over & is_even),
            ("truncated", f["truncated"], (is_over & ~is_even) | is_cut),
            ("done", f["done"], is_over | is_cut),
            ("acting version", f["action"][:, 0], f["version"].astype(np.float32)),
        ):
            wrong = np.flatnonzero((found != expected).reshape(len(found), -1).any(1))
            if len(wrong):
                at = int(wrong[0])
                raise Finding(
                    f"{name} of frame {at} of {where} (trajectory {int(f['traj'][at])}, {len(wrong)} wrong frames): "
                    f"{found[at]}, not {expected[at]}; it was observed as {f['obs'][at]}"
                )

    def finish(self) -> None:
        """Judge all frames together: ids, streams, and the order within a trajectory."""
        if not self._kept:
            return
        f = {key: np.concatenate([frames[key] for frames in self._kept]) for key in self._kept[0]}
        order = np.lexsort((f["obs"][:, STEP], f["traj"]))
        f = {key: values[order] for key, values in f.items()}
        obs, same = f["obs"], f["traj"][1:] == f["traj"][:-1]
        gap = np.diff(obs[:, STEP])
        follows = same & (gap == 1)
        lived = f["next"]
        changed_life = lived[1:, LIFE] != lived[:-1, LIFE]
        for name, wrong in (
            ("stands for two environments", same & (obs[1:, SEED] != obs[:-1, SEED])),
            ("stands for two episodes", same & (obs[1:, EPISODE] != obs[:-1, EPISODE])),
            ("was delivered twice at one step", same & (gap == 0)),
            ("goes on after its end", same & f["done"][:-1]),
            ("is two stretches that were joined", follows & (obs[1:, ECHO] != f["next"][:-1, ECHO])),
            ("goes on in another life without a state", same & changed_life & (lived[1:, BORN] == 0)),
            ("has versions that go back", same & (f["version"][1:] < f["version"][:-1])),
            ("misses frames", same & (gap > 1) & (not self.may_miss)),
        ):
            if (at := np.flatnonzero(wrong)).size:
                i = int(at[0])
                raise Finding(
                    f"trajectory {int(f['traj'][i])} {name} ({at.size} places); one frame is {obs[i]}, the next "
                    f"{obs[i + 1]}; versions {f['version'][i]}, {f['version'][i + 1]}"
                )
        began = f["next"][f["next"][:, BORN] == 0]
        pairs = np.unique(began[:, [SEED, LIFE]], axis=0)
        seeds, lives = np.unique(pairs[:, 0], return_counts=True)
        if (lives > 1).any():
            seed = seeds[lives > 1][0]
            raise Finding(f"seed {int(seed)} began {lives.max()} times: {int((lives > 1).sum())} streams come twice")
        episodes = np.unique(np.column_stack([f["next"][:, [LIFE, EPISODE]], f["traj"]]), axis=0)
        keys, counts = np.unique(episodes[:, :2], axis=0, return_counts=True)
        if (counts > 1).any():
            life, episode = keys[counts > 1][0]
            raise Finding(f"episode {int(episode)} of life {int(life)} has {counts.max()} trajectory ids")


def extract(nested: Mapping[str, Any]) -> dict[str, Array]:
    """Copies of the frames of a batch, one row each."""
    following, collector = nested["next"], nested["collector"]
    reward = np.asarray(following["reward"])
    shape = reward.shape[:2]
    has_mask = "mask" in set(collector.keys())
    mask = np.asarray(collector["mask"]) if has_mask else np.ones(shape, bool)
    lengths = mask.sum(1)
    is_last = np.arange(shape[1])[None, :] == (lengths - 1)[:, None]

    def rows(values: Any) -> Array:
        return np.array(np.asarray(values)[mask])

    return {
        "traj": rows(collector["traj_ids"]),
        "version": rows(collector["policy_version"]),
        "obs": rows(nested["observation"]),
        "next": rows(following["observation"]),
        "action": rows(nested["action"]),
        "reward": rows(reward).reshape(-1),
        "is_last": is_last[mask],
        **{name: rows(following[name]).reshape(-1) for name in ("done", "terminated", "truncated")},
    }


def compare(before: Mapping[str, Array], after: Mapping[str, Array], what: str) -> None:
    """The same frames at two moments. Raises Finding where they differ."""
    for name, values in before.items():
        if not np.array_equal(values, after[name], equal_nan=True):
            raise Finding(f"{what}, with another {name}: its memory was overwritten under its reader")
