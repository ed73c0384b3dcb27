"""A plain loop beside every placement: takes each batch, steps the same environments in its own few lines, and derives
what each column must be. It knows what batches promise, and nothing of how they are made.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cormorant_testing.placements.cells import CUT, LONGEST, SIZES, WARMUP, Cell
from cormorant_testing.placements.echo_env import IDENTS, STEPS, length_of
from cormorant_testing.placements.witness import weights_of

OUTPUTS = ("seen", "acting", "mean", "drawn", "log_prob")
CLIP = 3.0


@dataclass
class Moment:
    """What one step must give. NaN stands for what no formula gives."""

    following: Any
    reward: float
    terminated: bool = False
    truncated: bool = False
    info: dict[str, float] = field(default_factory=dict)


def step_echo(obs: Any, action: Any, elapsed: int) -> Moment:
    ident, episode = round(float(obs[0]) * IDENTS), round(float(obs[1]) * STEPS)
    reached = np.array([obs[0], obs[1], elapsed / STEPS, *action], np.float32)
    is_over, is_even = elapsed >= length_of(ident, episode), episode % 2 == 0
    reward = float(np.float32(elapsed / STEPS) + action[0])
    info = {"echo": float(action[1]), "won": is_over and is_even}
    return Moment(reached, reward, is_over and is_even, is_over and not is_even, info)


def step_pendulum(obs: Any, action: Any, elapsed: int) -> Moment:
    cos, sin, speed = map(float, obs)
    angle, torque = math.atan2(sin, cos), float(action[0])
    faster = speed + 0.05 * (15 * sin + 3 * torque)
    moved = angle + 0.05 * faster  # EnvPool limits the speed after it has moved, gymnasium before
    cost = angle**2 + 0.1 * speed**2 + 0.001 * torque**2
    return Moment(np.array([math.cos(moved), math.sin(moved), min(8.0, max(-8.0, faster))]), -cost)


def step_cartpole(obs: Any, action: Any, elapsed: int) -> Moment:
    x, v, angle, spin = map(float, obs)
    force = 10.0 if int(action) == 1 else -10.0
    push = (force + 0.05 * spin**2 * math.sin(angle)) / 1.1
    turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
    reached = np.array([x + 0.02 * v, v, angle + 0.02 * spin, spin + 0.02 * turn])
    reached[1] += 0.02 * (push - 0.05 * turn * math.cos(angle) / 1.1)
    return Moment(reached, 1.0, terminated=abs(reached[0]) > 2.4 or abs(reached[2]) > 12 * math.pi / 180)


def step_cheetah(obs: Any, action: Any, elapsed: int) -> Moment:
    cost = -0.1 * float(np.square(np.asarray(action, np.float64)).sum())
    return Moment(np.full(17, np.nan), math.nan, info={"reward_ctrl": cost})


STEP = {"echo": step_echo, "pendulum": step_pendulum, "cartpole": step_cartpole, "cheetah": step_cheetah}


def is_start(world: str, obs: Any) -> bool:
    """Whether an episode may begin so."""
    if world == "echo":
        return not obs[2:].any()
    if world == "pendulum":
        return abs(float(obs[2])) <= 1.0
    return bool(np.abs(obs).max() <= 0.05) if world == "cartpole" else bool(np.abs(obs[:8]).max() <= 0.1)


@dataclass
class Stream:
    """One environment of one worker."""

    following: Any = None
    """What is observed next; None: the start of an episode."""
    traj: int = -1
    length: int = 0
    elapsed: int = 0
    count: float = 0.0
    version: int = -1
    ident: float = -1.0
    episode: int = -1
    was_marked: bool = True
    """The last frame ended its trajectory, or there was none."""
    is_rewound: bool = False
    """A state was restored: it goes on from somewhere."""


class PlainLoop:
    """`take` every batch in the order of delivery; `publish` before a version is; `rewind` when a state is restored."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.frames, self.random_frames, self.crashes = cell, 0, 0, 0
        self.published, self._has_rewound = 0, False
        self.streams: dict[tuple[int, int], Stream] = {}
        self.observed: list[Any] = []
        self._num_counted = 0
        """Of those, in the statistics: a fleet's batch counts when the next one is asked for."""
        self._ids: set[int] = set()
        self._idents: set[float] = set()
        self._weights = {0: weights_of(0, *SIZES[cell.world])}
        self._scales: dict[int, tuple[Any, Any]] = {0: (0.0, 1.0)}

    def publish(self, version: int, weights: Any = None) -> Any:
        """The weights of a version, which acts with the statistics of the frames that count so far."""
        prefix = "witness." if {"tensordict", "recurrent"} & set(self.cell.choices) else ""
        self._weights[version] = weights or weights_of(version, *SIZES[self.cell.world])
        if "normalize" in self.cell and self._num_counted >= 2:
            seen = np.array(self.observed[: self._num_counted], np.float64)
            self._scales[version] = seen.mean(axis=0), np.sqrt(seen.var(axis=0) + 1e-8)
        else:
            self._scales[version] = 0.0, 1.0
        self.published = version
        return {f"{prefix}{name}": value for name, value in self._weights[version].items()}

    def mark(self) -> tuple[int, set[int]]:
        """The moment in which a state is saved, for `rewind`."""
        are_saved = self.cell.is_saved
        return self._num_counted, self._ids - {s.traj for s in self.streams.values() if are_saved and not s.was_marked}

    def rewind(self, mark: tuple[int, set[int]], *, is_elsewhere: bool) -> None:
        """The state of that moment was restored. `is_elsewhere`: in another collector, which goes on with the ids."""
        self._num_counted = mark[0]
        del self.observed[self._num_counted :]
        self._has_rewound = True
        for stream in self.streams.values():
            stream.is_rewound = True
            stream.traj = -1 if is_elsewhere else stream.traj
        if is_elsewhere:
            self._ids = mark[1]

    def take(self, batch: Any) -> None:
        flat = {".".join(key) if isinstance(key, tuple) else key: batch[key] for key in batch.keys(True, True)}
        values = {key: value.numpy() for key, value in flat.items()}
        mask = values.pop("collector.mask", np.ones(batch.shape, bool))
        lengths = mask.sum(1)
        np.testing.assert_array_equal(mask, np.arange(batch.shape[1]) < lengths[:, None])
        assert batch.shape[0] in (self.cell.num_envs, self.cell.num_envs * self.cell.workers), batch.shape
        for row, length in enumerate(lengths.tolist()):
            for t in range(length):
                frame = {key: value[row, t] for key, value in values.items()}
                where = f"row {row}, step {t} of a batch after {self.frames} frames"
                worker = int(frame["collector.traj_ids"]) >> 34
                stream = self.streams.setdefault(
                    (worker, row % self.cell.num_envs), Stream(is_rewound=self._has_rewound)
                )
                try:
                    self._frame(frame, stream, is_last=t == length - 1, is_first=t == 0)
                except AssertionError as error:
                    error.add_note(f"{where}; stream {stream}; frame {frame}")
                    raise
            for key, value in values.items():  # what the last frame led to stays
                kept = length + (key in ("observation", "count"))
                assert not value[row, kept:].any(), f"padding of {key}"
        self.frames += int(lengths.sum())
        self._num_counted = len(self.observed)
        self.observed += list(values["observation"][mask].copy())
        if "collector" in self.cell:
            self._num_counted = len(self.observed)

    def _frame(self, f: dict[str, Any], s: Stream, *, is_first: bool, is_last: bool) -> None:
        obs, action, version = f["observation"], f["action"], int(f["collector.policy_version"])
        self._begin(f, s, obs, is_first=is_first)
        assert (s.version if not s.is_rewound else -1) <= version <= self.published, f"version {version}"
        s.is_rewound = False
        if "on_policy" in self.cell:
            assert version in (-1, self.published), f"version {version}, {self.published} is published"
        if "is_init" in f:
            assert bool(f["is_init"]) == (s.length == 0), "is_init"
        if "count" in f:
            assert f["count"].item() == s.count, f"count {f['count']}"
            s.count = s.count + 1 if version >= 0 else 0.0
            assert f["next.count"].item() == s.count, f"next count {f['next.count']}"
        self._check_acting(f, s, obs, action, version)
        s.length, s.elapsed, s.version = s.length + 1, s.elapsed + 1, version
        self._check_step(f, s, obs, action, is_last=is_last)

    def _begin(self, f: dict[str, Any], s: Stream, obs: Any, *, is_first: bool) -> None:
        traj = int(f["collector.traj_ids"])
        has_crashed = "crashes" in self.cell and obs[0] not in self._idents and s.ident >= 0
        # A worker that collected nothing since the state was saved goes on under the old id.
        if (s.is_rewound and traj != s.traj) or (is_first and self._may_miss):
            s.elapsed = s.length = self._elapsed(f)
            s.count, s.following = f["count"].item() if "count" in f else 0.0, obs if s.elapsed else None
            s.was_marked = s.traj != traj
            assert not self.cell.is_saved or "jax" in self.cell or s.ident in (-1.0, obs[0]), "another environment"
            s.ident = float(obs[0])
            self._idents.add(s.ident)
        elif has_crashed:
            # Without a frame of its own in this batch, its trajectory has none left to mark.
            assert s.was_marked or is_first, "a crash that marks no frame"
            s.was_marked, s.following, s.length, s.elapsed, s.count, s.episode = True, None, 0, 0, 0.0, -1
            self.crashes += 1
            s.ident = -1.0
        if s.was_marked:
            assert traj not in self._ids, f"trajectory id {traj} begins twice"
            self._ids.add(traj)
            s.traj, s.was_marked = traj, False
        assert traj == s.traj, f"trajectory id {traj}"
        if s.following is None:
            assert is_start(self.cell.world, obs), "no start of an episode"
            if self.cell.world == "echo":
                self._begin_echo(obs, s)
        else:
            np.testing.assert_array_equal(obs, s.following, "observation is what followed")
        s.episode = round(float(obs[1]) * STEPS)

    @property
    def _may_miss(self) -> bool:
        """What asynchronous environments acted on before a publish is too old for `maxStaleness: 0`."""
        return "on_policy" in self.cell and ("_b" in self.cell.choices[0] or "vector_held" in self.cell)

    def _elapsed(self, f: dict[str, Any]) -> int:
        """Steps of the episode before this frame, as the environment says."""
        return int(f["next.info.elapsed_step"]) - 1 if self.cell.is_pool else round(float(f["observation"][2]) * STEPS)

    def _begin_echo(self, obs: Any, s: Stream) -> None:
        if "jax" in self.cell:  # an episode has a number of its own, not an environment
            assert self._has_rewound or obs[0] not in self._idents, "two episodes have one key"
            self._idents.add(float(obs[0]))
            return
        if s.ident < 0:
            assert obs[0] not in self._idents, "two environments have one seed"
            self._idents.add(float(obs[0]))
        else:
            assert obs[0] == s.ident, "another environment"
        if not s.is_rewound:
            begun = round(float(obs[1]) * STEPS)
            assert begun == s.episode + 1 or (self._may_miss and begun > s.episode), "an episode was left out"
        s.ident = float(obs[0])

    def _check_acting(self, f: dict[str, Any], s: Stream, obs: Any, action: Any, version: int) -> None:
        if version < 0:
            self.random_frames += 1
            assert not any(np.any(f[key]) for key in OUTPUTS if key in f), "a random frame has outputs"
            return
        center, std = self._scales[version]
        seen = obs
        if "normalize" in self.cell:
            seen = np.clip((np.asarray(obs, np.float64) - center) / std, -CLIP, CLIP).astype(np.float32)
        w = self._weights[version]
        hidden = torch.tanh(torch.as_tensor(seen).float() @ w["trunk.0.weight"].T + w["trunk.0.bias"])
        mean = (0.5 * torch.tanh(hidden @ w["trunk.2.weight"].T + w["trunk.2.bias"])).numpy()
        drawn = np.zeros_like(mean)
        if "acting" in f:
            assert float(f["acting"]) == version, f"weights {f['acting']} acted"
            np.testing.assert_allclose(f["seen"], seen, rtol=1e-5, atol=1e-5, err_msg="seen")
            np.testing.assert_allclose(f["mean"], mean, atol=1e-4, err_msg="mean")
            mean, drawn = f["mean"], f["drawn"]
            np.testing.assert_allclose(f["log_prob"], -0.5 * np.square(drawn).sum(), rtol=1e-5, err_msg="log_prob")
        if "was_init" in f:
            assert bool(f["was_init"]) == (s.length == 0), "was_init"
        before = s.count - 1 if "count" in f else 0.0
        choice = np.clip(mean + drawn / np.float32(4) + np.float32(before / 64), -1, 1)
        if self.cell.world != "cartpole":
            np.testing.assert_allclose(action, choice, atol=1e-6 if "acting" in f else 1e-4, err_msg="action")
        elif abs(choice[0]) > 1e-4:
            assert int(action) == int(choice[0] > 0), "action"

    def _check_step(self, f: dict[str, Any], s: Stream, obs: Any, action: Any, *, is_last: bool) -> None:
        cell, exact = self.cell, self.cell.world == "echo"
        moment = STEP[cell.world](obs, action, s.elapsed)
        following = f["next.observation"]
        known = ~np.isnan(moment.following)
        tolerance = 0.0 if exact else 1e-5
        np.testing.assert_allclose(following[known], moment.following[known], tolerance, tolerance, err_msg="next")
        if not math.isnan(moment.reward):
            np.testing.assert_allclose(f["next.reward"], moment.reward, tolerance, tolerance, err_msg="reward")
        else:
            both = f["next.info.reward_ctrl"] + f["next.info.reward_run"]
            np.testing.assert_allclose(f["next.reward"], both, 1e-5, 1e-5, err_msg="reward")
        info = moment.info if exact else {**moment.info, "elapsed_step": s.elapsed}
        for key, value in info.items():
            np.testing.assert_allclose(f[f"next.info.{key}"], value, 1e-6, 1e-6, err_msg=f"info {key}")
        ended = bool(f["next.terminated"]), bool(f["next.truncated"])
        assert bool(f["next.done"]) == any(ended), "done"
        is_over = moment.terminated or moment.truncated or (cell.is_pool and s.elapsed >= LONGEST)
        is_cut = not is_over and "cut" in cell and s.length == CUT
        is_reset = not is_over and not is_cut and "resets" in cell and is_last
        if is_over and s.elapsed >= LONGEST and cell.is_pool:
            assert any(ended), "the limit"  # EnvPool reports a fall on the step of the limit as truncated only
        elif "crashes" in cell and ended == (False, True) and not (is_over or is_cut or is_reset):
            pass  # the next frame has to be another environment's
        else:
            assert ended == (moment.terminated, moment.truncated or is_cut or is_reset), f"ended {ended}"
        s.following, s.was_marked = (None if any(ended) else following.copy()), any(ended)
        if (is_over or is_cut) and "resets" in cell and is_last:
            s.episode += 1  # it had begun anew before the reset
        if any(ended):
            s.length, s.elapsed, s.count = 0, 0, 0.0

    def finish(self) -> None:
        cell = self.cell
        assert len(self.streams) == cell.num_envs * cell.workers, "environments that never came"
        if "restored" not in cell:
            assert self.frames == cell.total_frames, "frames"
            if "crashes" not in cell:
                assert self.random_frames == (WARMUP if "warmup" in cell else 0), "random frames"
        assert (self.crashes > 0) == ("crashes" in cell), "crashes"
        assert self.published >= 3, "publishes"
