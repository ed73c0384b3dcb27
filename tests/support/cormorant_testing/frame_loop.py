"""The plain loop beside whatever collects: takes each batch in the order of delivery, steps the same environments in
its own few lines, and says what each frame must be. It knows what batches promise, and nothing of how they are made.

`check` has the loop of CountingEnvs, `placements` those of its table and of parties. What is checked here, for all: the
mask and the padding, that an id stands for one stretch of one episode, that what follows a frame is what the next one
begins with, `is_init`, that versions never go back, and how a frame ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Frame = dict[str, Any]
"""Values of one frame, by their keys joined with dots."""
Attempt = tuple[int, int, int, int]
"""(group number, slot index, attempt, epoch)."""


def attempt_of(traj_id: int) -> Attempt:
    """The worker attempt in the upper bits of a trajectory id."""
    upper = traj_id >> 34
    return upper >> 26, upper >> 12 & 0x3FFF, (traj_id & (1 << 34) - 1) >> 24, upper & 0xFFF


@dataclass
class Moment:
    """What one step must give."""

    values: Mapping[str, Any]
    """By key."""
    terminated: bool
    truncated: bool
    tolerance: float = 0.0


@dataclass
class Stream:
    """One environment of one worker."""

    ident: int | None = -1
    """Which environment it is; -1: not known yet."""
    episode: int = -1
    step: int = 0
    """Frames of the trajectory so far, which are the steps of the episode."""
    traj: int = -1
    following: Frame | None = None
    """What is observed next; None: the start of an episode."""
    counts: dict[str, float] = field(default_factory=dict)
    version: int = -1
    restarts: int = 0
    batch: int = -1
    """The last one that had a frame of it."""
    is_new: bool = False
    """A state was restored: it goes on from anywhere."""


@dataclass(kw_only=True)
class FrameLoop:
    """Raises AssertionError at the first wrong value, with a note of where it is."""

    num_envs: int
    max_frames: int = 0
    """maxFramesPerTrajectory."""
    resets: bool = False
    """resetAtEachBatch."""
    crashes: bool = False
    """Environments may be restarted: truncated at their last frame of a batch, if they have one there."""
    gaps: bool = False
    """Batches may be missing (drop_oldest, staleness, kills): streams go on later than where they were, not before."""
    saves: bool = False
    """States hold the environments."""
    frames: int = 0
    random_frames: int = 0
    batches: int = 0
    streams: dict[tuple[Any, int], Stream] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    """Lengths of the episodes that ended, but for crashes."""
    _ids: set[int] = field(default_factory=set)
    _idents: set[int | None] = field(default_factory=set)
    _has_restored: bool = False

    @property
    def restarts(self) -> int:
        """Environments that were seen to be restarted."""
        return sum(stream.restarts for stream in self.streams.values())

    def restored(self) -> None:
        """A state was: every environment goes on from anywhere."""
        self._has_restored = True
        self._idents.clear()
        for stream in self.streams.values():
            stream.is_new, stream.ident, stream.version = True, -1, -1

    def take(self, batch: Any) -> int:
        """Check one batch `[B, T]` or `[W*B, T]`. Returns its number of frames."""
        keys = {".".join(key) if isinstance(key, tuple) else key: key for key in batch.keys(True, True)}
        values = {name: batch[key].numpy() for name, key in keys.items()}
        (rows, steps), mask = batch.shape, values.pop("collector.mask", np.ones(batch.shape, bool))
        lengths = mask.sum(1)
        assert rows % self.num_envs == 0, batch.shape
        assert batch.names[-1] == "time"
        np.testing.assert_array_equal(mask, np.arange(steps) < lengths[:, None])
        places = [attempt_of(int(traj))[:2] for traj in values["collector.traj_ids"][:: self.num_envs, 0]]
        assert rows == self.num_envs or places == sorted(set(places)), f"parts are not in the order of {places}"
        for row, length in enumerate(lengths.tolist()):
            for t in range(length):
                frame = {name: value[row, t] for name, value in values.items()}
                key = self._key(int(frame["collector.traj_ids"])), row % self.num_envs
                if (stream := self.streams.get(key)) is None:
                    stream = self.streams[key] = self._open(*key)
                try:
                    self._frame(frame, stream, is_first=t == 0, is_last=t == length - 1)
                except AssertionError as error:
                    error.add_note(f"batch {self.batches}, row {row}, step {t}; {stream}; {frame}")
                    raise
            for name, value in values.items():  # what the last frame led to stays
                assert not value[row, length + (f"next.{name}" in values) :].any(), f"padding of {name} in row {row}"
        self.batches += 1
        self.frames += int(lengths.sum())
        return int(lengths.sum())

    # -- what a kind of environment and policy says ------------------------------------------------------------

    def _key(self, traj: int) -> Any:
        """What a trajectory's stream is known by, beside its column."""
        return attempt_of(traj)

    def _open(self, key: Any, column: int) -> Stream:
        return Stream(is_new=self._has_restored)

    def _place(self, f: Frame, s: Stream) -> tuple[int | None, int, int]:
        """Which environment it is, the episode and its steps, as the frame shows them; None: no frame shows it."""
        raise NotImplementedError

    def _first(self, s: Stream) -> Mapping[str, Any]:
        """What the first frame of an episode shows."""
        raise NotImplementedError

    def _check_acting(self, f: Frame, s: Stream, version: int) -> None:
        """Check that the weights of this version chose the action; -1: it was drawn at random."""

    def _moment(self, f: Frame, s: Stream) -> Moment:
        """What the step of this frame, the `s.step`-th of its episode, must give."""
        raise NotImplementedError

    # -- one frame ---------------------------------------------------------------------------------------------

    def _frame(self, f: Frame, s: Stream, *, is_first: bool, is_last: bool) -> None:
        traj, version = int(f["collector.traj_ids"]), int(f["collector.policy_version"])
        if is_first and (self.gaps or s.is_new):
            self._resume(f, s, traj)
        elif s.following is not None and traj != s.traj:
            assert (self.crashes, is_first) == (True, True), "a trajectory that ends without a mark"
            s.following = None
        if s.following is None:
            assert traj not in self._ids, f"trajectory id {traj} begins twice"
            self._ids.add(traj)
            s.traj, s.counts = traj, {}
            self._begin(f, s)
        else:
            check(f, s.following, "what followed")
        s.is_new = False
        assert traj == s.traj, f"trajectory id {traj}"
        assert version >= s.version or (version < 0 and self.gaps), f"version {version} after {s.version}"
        s.version = max(s.version, version)
        s.batch, self.random_frames = self.batches, self.random_frames + (version < 0)
        assert "is_init" not in f or bool(f["is_init"]) == (s.step == 0), "is_init"
        self._check_acting(f, s, version)
        s.step += 1
        self._end(f, s, self._moment(f, s), is_last=is_last)

    def _begin(self, f: Frame, s: Stream) -> None:
        ident, episode, step = self._place(f, s)
        assert step == 0, "no start of an episode"
        self._meet(s, ident)
        # A batch without a frame of it resets it, too.
        may_skip = s.is_new or (self.resets and s.batch < self.batches - 1 and episode > s.episode)
        assert may_skip or episode == s.episode + 1, f"episode {episode} after {s.episode}"
        s.episode, s.step = episode, 0
        check(f, self._first(s), "at the start of an episode")

    def _meet(self, s: Stream, ident: int | None) -> None:
        if ident == s.ident:
            return
        assert s.ident == -1 or self.crashes, f"another environment, {ident}"
        assert ident is None or ident not in self._idents, f"two environments are {ident}"
        self._idents.add(ident)
        s.restarts += s.ident != -1
        s.ident, s.episode, s.step = ident, -1, 0

    def _resume(self, f: Frame, s: Stream, traj: int) -> None:
        """Batches between the last one and this one may be missing."""
        ident, episode, step = self._place(f, s)
        goes_on = s.following is not None and traj == s.traj
        if goes_on and all(np.array_equal(f[name], value) for name, value in s.following.items()):
            s.ident = ident
            return
        self._meet(s, ident)
        assert s.is_new or (episode, step) >= (s.episode, s.step), "an earlier frame"
        if step == 0:
            s.following, s.episode = None, episode - 1
            return
        assert self.gaps or (s.is_new and self.saves), "no start of an episode"
        if traj == s.traj:
            assert self.gaps, "not what followed"
        else:
            assert traj not in self._ids, f"trajectory id {traj} goes on after its end"
            assert s.is_new or episode != s.episode, "the trajectory id changes within an episode"
            self._ids.add(traj)
        s.traj, s.episode, s.step, s.following = traj, episode, step, {}
        s.counts = {name: float(f[name].max()) for name in f if f"next.{name}" in f and name.endswith("count")}

    def _check_count(self, f: Frame, s: Stream, name: str, first: float, *, acts: bool) -> None:
        """The recurrent state of a policy that counts the frames in which it acted."""
        if name in f:
            assert (f[name] == s.counts.get(name, first)).all(), f"{name} {f[name]}"
            s.counts[name] = s.counts.get(name, first) + 1 if acts else first
            assert (f[f"next.{name}"] == s.counts[name]).all(), f"next {name} {f[f'next.{name}']}"

    def _end(self, f: Frame, s: Stream, moment: Moment, *, is_last: bool) -> None:
        check(f, moment.values, "after the step", moment.tolerance)
        ended = bool(f["next.terminated"]), bool(f["next.truncated"])
        assert bool(f["next.done"]) == any(ended), "done"
        is_over = moment.terminated or moment.truncated
        is_cut = not is_over and s.step == self.max_frames
        is_reset = not is_over and not is_cut and self.resets and is_last
        expected = moment.terminated, moment.truncated or is_cut or is_reset
        has_crashed = self.crashes and ended == (False, True) and not any(expected)
        assert has_crashed or ended == expected, f"(terminated, truncated) {ended}, not {expected}"
        if any(expected):
            self.ended.append(s.step)
        # An episode that ended with the batch was reset there, and is reset again when the next batch begins.
        s.episode += self.resets and is_last and (is_over or is_cut)
        names = [name for name in f if f"next.{name}" in f and not name.endswith("count")]
        s.following = None if any(ended) else {name: f[f"next.{name}"].copy() for name in names}


def check(f: Frame, expected: Mapping[str, Any], what: str, tolerance: float = 0.0) -> None:
    for name, value in expected.items():
        found = f[name].reshape(np.shape(value))
        if tolerance:
            is_same = np.allclose(found, value, tolerance, tolerance)
        else:
            is_same = found.dtype == getattr(value, "dtype", found.dtype) and np.array_equal(found, value)
        assert is_same, f"{name} {what}: {found.tolist()}, not {np.asarray(value).tolist()}"
