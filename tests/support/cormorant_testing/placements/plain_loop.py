"""The plain loop of the table of placements: what each kind of environment and the policy of all cells must give."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cormorant_testing.frame_loop import Frame, FrameLoop, Moment, Stream
from cormorant_testing.placements.cells import CUT, LONGEST, SIZES, WARMUP, Cell
from cormorant_testing.placements.echo_env import IDENTS, STEPS, length_of
from cormorant_testing.placements.witness import weights_of

OUTPUTS = ("seen", "acting", "mean", "drawn", "log_prob")
CLIP = 3.0
FALLS = 12 * math.pi / 180


def numbers_of(obs: Any) -> tuple[int, int]:
    """Which EchoEnv was observed, and in which episode."""
    return round(float(obs[0]) * IDENTS), round(float(obs[1]) * STEPS)


def step_echo(f: Frame, step: int) -> Moment:
    obs, action, (ident, episode) = f["observation"], f["action"], numbers_of(f["observation"])
    is_over, is_even = step >= length_of(ident, episode), episode % 2 == 0
    values = {
        "next.observation": np.array([obs[0], obs[1], step / STEPS, *action], np.float32),
        "next.reward": np.float32(float(np.float32(step / STEPS) + action[0])),
        "next.info.echo": action[1],
        "next.info.won": is_over and is_even,
    }
    return Moment(values, is_over and is_even, is_over and not is_even)


def pool(step: int, following: Any, reward: float, *, falls: bool = False) -> Moment:
    """EnvPool reports a fall on the step of the limit as truncated only."""
    values = {"next.observation": following, "next.reward": reward, "next.info.elapsed_step": step}
    return Moment(values, falls and step < LONGEST, step >= LONGEST, tolerance=1e-5)


def step_pendulum(f: Frame, step: int) -> Moment:
    (cos, sin, speed), torque = map(float, f["observation"]), float(f["action"][0])
    angle = math.atan2(sin, cos)
    faster = speed + 0.05 * (15 * sin + 3 * torque)
    moved = angle + 0.05 * faster  # EnvPool limits the speed after it has moved, gymnasium before
    following = np.array([math.cos(moved), math.sin(moved), min(8.0, max(-8.0, faster))])
    return pool(step, following, -(angle**2 + 0.1 * speed**2 + 0.001 * torque**2))


def step_cartpole(f: Frame, step: int) -> Moment:
    x, v, angle, spin = map(float, f["observation"])
    force = 10.0 if int(f["action"]) == 1 else -10.0
    push = (force + 0.05 * spin**2 * math.sin(angle)) / 1.1
    turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
    reached = np.array([x + 0.02 * v, v, angle + 0.02 * spin, spin + 0.02 * turn])
    reached[1] += 0.02 * (push - 0.05 * turn * math.cos(angle) / 1.1)
    return pool(step, reached, 1.0, falls=abs(reached[0]) > 2.4 or abs(reached[2]) > FALLS)


STARTS = {"pendulum": (slice(2, 3), 1.0), "cartpole": (slice(4), 0.05)}
"""By pool, how far its first observation is from zero at most, and in which values."""
STEP = {"echo": step_echo, "pendulum": step_pendulum, "cartpole": step_cartpole}


class PlainLoop(FrameLoop):
    """`take` every batch in the order of delivery; `publish` before a version is; `rewind` when a state is restored."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(
            num_envs=cell.num_envs,
            max_frames=CUT if "cut" in cell else 0,
            resets="resets" in cell,
            crashes="crashes" in cell,
            # What asynchronous environments acted on before a publish is too old for `maxStaleness: 0`.
            gaps="on_policy" in cell and ("_b" in cell.choices[0] or "vector_held" in cell),
            saves=cell.is_saved,
        )
        self.cell, self.published = cell, 0
        self.observed: list[Any] = []
        self._num_counted = 0
        """Of those, in the statistics: a fleet's batch counts when the next one is asked for."""
        self._weights = {0: weights_of(0, *SIZES[cell.world])}
        self._scales: dict[int, tuple[Any, Any]] = {0: (0.0, 1.0)}

    def publish(self, version: int) -> Any:
        """The weights of a version, which acts with the statistics of the frames that count so far."""
        prefix = "witness." if {"tensordict", "recurrent"} & set(self.cell.choices) else ""
        self._weights[version] = weights_of(version, *SIZES[self.cell.world])
        if "normalize" in self.cell and self._num_counted >= 2:
            seen = np.array(self.observed[: self._num_counted], np.float64)
            self._scales[version] = seen.mean(axis=0), np.sqrt(seen.var(axis=0) + 1e-8)
        else:
            self._scales[version] = 0.0, 1.0
        self.published = version
        return {f"{prefix}{name}": value for name, value in self._weights[version].items()}

    def mark(self) -> tuple[int, set[int]]:
        """The moment in which a state is saved, for `rewind`."""
        open_ones = {s.traj for s in self.streams.values() if self.saves and s.following is not None}
        return self._num_counted, self._ids - open_ones

    def rewind(self, mark: tuple[int, set[int]], *, is_elsewhere: bool) -> None:
        """The state of that moment was restored. `is_elsewhere`: in another collector, which goes on with the ids."""
        self._num_counted = mark[0]
        del self.observed[self._num_counted :]
        self.restored()
        if is_elsewhere:
            self._ids = mark[1]
            for stream in self.streams.values():
                stream.traj = -1

    def take(self, batch: Any) -> int:
        assert batch.shape[0] in (self.num_envs, self.num_envs * self.cell.workers), batch.shape
        frames = super().take(batch)
        mask = batch.get(("collector", "mask"), None)
        self._num_counted = len(self.observed)
        self.observed += list(batch["observation"][... if mask is None else mask].flatten(0, -2).numpy().copy())
        if "collector" in self.cell:
            self._num_counted = len(self.observed)
        return frames

    def _key(self, traj: int) -> int:
        return traj >> 34  # a worker, whatever its attempt

    def _place(self, f: Frame, s: Stream) -> tuple[int | None, int, int]:
        ident, episode = (None, int(f["collector.traj_ids"])) if self._is_anonymous else numbers_of(f["observation"])
        if self.cell.is_pool:
            return ident, episode, int(f["next.info.elapsed_step"]) - 1
        return ident, episode, round(float(f["observation"][2]) * STEPS)

    @property
    def _is_anonymous(self) -> bool:
        """Its frames do not show whose they are: of JAX, an episode has numbers of its own, not an environment."""
        return self.cell.is_pool or "jax" in self.cell

    def _begin(self, f: Frame, s: Stream) -> None:
        if not self._is_anonymous:
            super()._begin(f, s)
            return
        s.ident, s.episode, s.step = self._place(f, s)
        assert s.step == 0, "no start of an episode"
        if self.cell.is_pool:
            parts, most = STARTS[self.cell.world]
            assert np.abs(f["observation"][parts]).max() <= most, "no start of an episode"
            return
        numbers = hash(numbers_of(f["observation"]))
        assert self._has_restored or numbers not in self._idents, "two episodes have one key"
        self._idents.add(numbers)

    def _first(self, s: Stream) -> Mapping[str, Any]:
        assert s.ident is not None
        return {"observation": np.array([s.ident / IDENTS, s.episode / STEPS, 0, 0, 0], np.float32)}

    def _moment(self, f: Frame, s: Stream) -> Moment:
        return STEP[self.cell.world](f, s.step)

    def _check_acting(self, f: Frame, s: Stream, version: int) -> None:
        assert version <= self.published, f"version {version}"
        assert "on_policy" not in self.cell or version in (-1, self.published), f"{self.published} is published"
        self._check_count(f, s, "count", 0.0, acts=version >= 0)
        if version < 0:
            assert not any(np.any(f[key]) for key in OUTPUTS if key in f), "a random frame has outputs"
            return
        obs, action = f["observation"], f["action"]
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
        assert "was_init" not in f or bool(f["was_init"]) == (s.step == 0), "was_init"
        before = f["count"].item() if "count" in f else 0.0
        choice = np.clip(mean + drawn / np.float32(4) + np.float32(before / 64), -1, 1)
        if self.cell.world != "cartpole":
            np.testing.assert_allclose(action, choice, atol=1e-6 if "acting" in f else 1e-4, err_msg="action")
        elif abs(choice[0]) > 1e-4:
            assert int(action) == int(choice[0] > 0), "action"

    def finish(self) -> None:
        cell = self.cell
        assert len(self.streams) == cell.num_envs * cell.workers, "environments that never came"
        if "restored" not in cell:
            assert self.frames == cell.total_frames, "frames"
            if "crashes" not in cell:
                assert self.random_frames == (WARMUP if "warmup" in cell else 0), "random frames"
        assert (self.restarts > 0) == ("crashes" in cell), "crashes"
        assert self.published >= 3, "publishes"
