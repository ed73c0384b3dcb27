"""A counting environment whose every value is known by heart, and an oracle that says what it must be.

    CountingEnv(lengths=(2, 3)), reset(seed=7), actions a1, a2, ...
    observation counts  [ident, episode, step, echo]:   reset [7, 0, 0, 0]
    step a1  ->  [7, 0, 1, a1]  reward 1
    step a2  ->  [7, 0, 2, a2]  reward 2, terminated    reset [7, 1, 0, 0]
    step a3  ->  [7, 1, 1, a3]  reward 1.001

An environment that is restarted gets another seed, and so another ident: failures bound to a seed happen once.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import structlog
from gymnasium import spaces

Ends = Literal["terminate", "truncate", "both", "alternate"]

IDENT_MODULUS = 65521
"""Idents are `seed % IDENT_MODULUS`: float32 holds them exactly."""

OBSERVATION_SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "image": spaces.Box(0, 255, (4, 6, 6), np.uint8),
    "dict": spaces.Dict(
        {"counts": spaces.Box(-np.inf, np.inf, (4,), np.float64), "step": spaces.Discrete(1_000_000_000)}
    ),
    "tuple": spaces.Tuple(
        (spaces.Box(-np.inf, np.inf, (2, 2), np.float32), spaces.MultiDiscrete([IDENT_MODULUS, 1_000_000]))
    ),
    "discrete": spaces.Discrete(2**62),
    "narrow": spaces.Discrete(100, dtype=np.int32),
    "multi_discrete": spaces.MultiDiscrete([IDENT_MODULUS, 1_000_000, 1_000_000]),
    "multi_binary": spaces.MultiBinary(24),
    "nested": spaces.Dict(
        {
            "cam": spaces.Tuple((spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(1_000_000_000))),
            "pos": spaces.Dict(
                {"counts": spaces.Box(-np.inf, np.inf, (4,), np.float32), "bits": spaces.MultiBinary(5)}
            ),
        }
    ),
}

ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(5),
    "discrete_start": spaces.Discrete(5, start=10),
    "narrow": spaces.Discrete(5, dtype=np.int8),
    "box": spaces.Box(-100.0, 100.0, (2,), np.float32),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "multi_binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"move": spaces.Box(-9.0, 9.0, (2,), np.float32), "fire": spaces.Discrete(2)}),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-9.0, 9.0, (), np.float64))),
}


def echo(action: Any) -> float:
    """One number for an action: the weighted sum of its leaves, in the space's own order."""
    if isinstance(action, Mapping):
        return sum((i + 1) * echo(part) for i, part in enumerate(action.values()))
    if isinstance(action, tuple):
        return sum((i + 1) * echo(part) for i, part in enumerate(action))
    flat = np.asarray(action, dtype=np.float64).reshape(-1)
    return float(np.dot(flat, np.arange(1, flat.size + 1)))


def observe(kind: str, ident: int, episode: int, step: int, echoed: float) -> Any:
    """The observation of one kind that encodes these counts."""
    counts = [ident, episode, step, echoed]
    match kind:
        case "box":
            return np.array(counts, np.float32)
        case "image":
            return np.full((4, 6, 6), pixel(ident, episode, step), np.uint8)
        case "dict":
            return {"counts": np.array(counts, np.float64), "step": step}
        case "tuple":
            return (np.array(counts, np.float32).reshape(2, 2), np.array([ident, step], np.int64))
        case "discrete":
            return (ident * 1_000_000 + episode) * 1_000_000 + step
        case "narrow":
            return step
        case "multi_discrete":
            return np.array([ident, episode, step], np.int64)
        case "multi_binary":
            bits = (ident % 256) * 65536 + (episode % 256) * 256 + step % 256
            return np.array([(bits >> i) & 1 for i in range(24)], np.int8)
        case "nested":
            return {
                "cam": (np.full((2, 2), pixel(ident, episode, step), np.uint8), step),
                "pos": {
                    "counts": np.array(counts, np.float32),
                    "bits": np.array([(step >> i) & 1 for i in range(5)], np.int8),
                },
            }
    raise ValueError(f"no observation kind {kind!r}; known are {', '.join(OBSERVATION_SPACES)}")


def pixel(ident: int, episode: int, step: int) -> int:
    return (ident * 31 + episode * 7 + step) % 256


def reward_of(episode: int, step: int) -> float:
    """step + episode / 1000, as float32 holds it."""
    return float(np.float32(step + (episode % 1000) / 1000))


def info_of(episode: int, step: int, echoed: float, *, ended: bool) -> dict[str, Any]:
    """A CountingEnv's info after a step; success, of every other episode, comes with its last step only."""
    info = {
        "step": step,
        "even": step % 2 == 0,
        "nested": {"echo": echoed},
        "pair": np.array([episode, step], np.int16),
    }
    return info | ({"success": episode % 2 == 0} if ended else {})


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What one step must return."""

    obs: Any
    """What to act on next: after the end of an episode, the first observation of the next."""
    final: Any
    """The true last observation where the episode ended, else None."""
    reward: float
    terminated: bool
    truncated: bool


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Says what a CountingEnv of these options and this seed must return."""

    seed: int
    lengths: Sequence[int] = (5,)
    longest: int = 0
    ends: Ends = "terminate"
    observation: str = "box"

    @classmethod
    def of(cls, seed: int, options: Mapping[str, Any]) -> "Oracle":
        """The oracle of an environment with these options; those that it does not know are ignored."""
        known = {name: options[name] for name in ("lengths", "longest", "ends", "observation") if name in options}
        if isinstance(known.get("lengths"), int):
            known["lengths"] = (known["lengths"],)
        return cls(seed=seed, **known)

    @property
    def ident(self) -> int:
        return self.seed % IDENT_MODULUS

    def length(self, episode: int) -> int:
        """Steps in an episode; with `longest`, a function of the seed between 1 and `longest`."""
        if self.longest:
            return 1 + (self.ident * 7 + episode * 3) % self.longest
        return self.lengths[episode % len(self.lengths)]

    def obs(self, episode: int, step: int, action: Any = None) -> Any:
        """The observation after `step` steps, the last of them with `action`."""
        return observe(self.observation, self.ident, episode, step, 0.0 if action is None else echo(action))

    def moment(self, episode: int, step: int, action: Any) -> Moment:
        """What the `step`-th step (from 1) of an episode (from 0) must return."""
        ended, obs = step >= self.length(episode), self.obs(episode, step, action)
        ends = ("terminate", "truncate")[episode % 2] if self.ends == "alternate" else self.ends
        return Moment(
            obs=self.obs(episode + 1, 0) if ended else obs,
            final=obs if ended else None,
            reward=reward_of(episode, step),
            terminated=ended and ends in {"terminate", "both"},
            truncated=ended and ends in {"truncate", "both"},
        )


@dataclass(frozen=True, kw_only=True)
class Failure:
    """When and how an environment fails. All conditions must hold."""

    how: Literal["raise", "hang", "exit", "kill", "nan", "slow", "shape"] = "raise"
    at: Literal["step", "reset", "init", "save", "restore"] = "step"
    step: int = 0
    """The step of its process at which it fails, from 1; 0 = every step."""
    seeds: Sequence[int] = ()
    """Only environments that were first reset with one of these seeds; none = all."""
    flag: str = ""
    """A file that counts occasions. Only occasions skip .. skip + times - 1 fail; no file = every occasion."""
    skip: int = 0
    times: int = 1
    seconds: float = 3600.0
    """For hang and slow."""
    words: str = "told to fail"

    def is_due(self, at: str, *, step: int, seed: int | None) -> bool:
        if at != self.at or (at == "step" and self.step not in {0, step}):
            return False
        if self.seeds and seed not in self.seeds:
            return False
        if not self.flag:
            return True
        with Path(self.flag).open("ab") as file:
            occasion = file.tell()
            file.write(b".")
        return self.skip <= occasion < self.skip + self.times

    def happen(self) -> None:
        match self.how:
            case "raise":
                raise ValueError(self.words)
            case "hang" | "slow":
                time.sleep(self.seconds)
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class _Counts:
    seed: int | None = None
    episode: int = -1
    step: int = 0
    total: int = 0
    """Steps of this object, over all episodes."""
    echoed: float = 0.0


class CountingEnv(gymnasium.Env[Any, Any]):
    """Counts; see the module. Keyword arguments are plain data, so that they travel in manifests and pickles.

    Args:
        lengths: steps of episode 0, 1, ...; begins again after the last.
        longest: if not 0, lengths are a function of the seed and at most this.
        ends: how episodes end.
        observation, action: kinds of spaces.
        failures: keyword arguments of `Failure`, any number of them.
        step_s: seconds that every step takes.
        shown: what the info of every step has beside `info_of`.
    """

    def __init__(
        self,
        *,
        lengths: Sequence[int] | int = 5,
        longest: int = 0,
        ends: Ends = "terminate",
        observation: str = "box",
        action: str = "discrete",
        failures: Sequence[Mapping[str, Any]] = (),
        step_s: float = 0.0,
        shown: Mapping[str, Any] = {},
    ) -> None:
        self._lengths = (lengths,) if isinstance(lengths, int) else tuple(lengths)
        self._oracle = Oracle(seed=0, lengths=self._lengths, longest=longest, ends=ends, observation=observation)
        self._failures = [Failure(**failure) for failure in failures]
        self._step_s, self._extra_info = step_s, dict(shown)
        self._counts = _Counts()
        self.observation_space = OBSERVATION_SPACES[observation]
        self.action_space = ACTION_SPACES[action]
        self._fail("init")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        counts = self._counts
        if seed is not None:
            counts.seed, counts.episode = seed, -1
        counts.episode += 1
        counts.step, counts.echoed = 0, 0.0
        return self._observe(self._fail("reset")), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise TypeError(f"{action!r} ({type(action).__name__}) is not in {self.action_space}")
        counts = self._counts
        counts.step, counts.total, counts.echoed = counts.step + 1, counts.total + 1, echo(action)
        hurt = self._fail("step")
        if self._step_s:
            time.sleep(self._step_s)
        moment = replace(self._oracle, seed=counts.seed or 0).moment(counts.episode, counts.step, action)
        info = info_of(counts.episode, counts.step, counts.echoed, ended=moment.final is not None)
        return self._observe(hurt), moment.reward, moment.terminated, moment.truncated, info | self._extra_info

    def get_state(self) -> dict[str, Any]:
        self._fail("save")
        c = self._counts
        return {"seed": c.seed, "counts": np.array([c.episode, c.step, c.total]), "echoed": c.echoed}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._fail("restore")
        self._counts = _Counts(state["seed"], *map(int, state["counts"]), float(state["echoed"]))

    def _observe(self, hurt: str) -> Any:
        if hurt == "shape":
            return np.zeros(99, np.float32)
        counts = self._counts
        echoed = float("nan") if hurt == "nan" else counts.echoed
        return observe(
            self._oracle.observation, (counts.seed or 0) % IDENT_MODULUS, counts.episode, counts.step, echoed
        )

    def _fail(self, at: str) -> str:
        for failure in self._failures:
            if failure.is_due(at, step=self._counts.total, seed=self._counts.seed):
                failure.happen()
                return failure.how
        return ""


class LogsAnything(CountingEnv):
    """Logs what a fleet's own log lines hold, and what no other process can read."""

    def step(self, action: Any) -> Any:
        log = structlog.get_logger()
        log.warning("said", worker="mine", event_kind="step", lock=threading.Lock(), step=self._counts.step)
        log.info("exploded", level=3, timestamp=object())
        return super().step(action)


class Stateless(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A user's wrapper, for example with keyword arguments; it cannot be saved."""

    def __init__(self, env: gymnasium.Env[Any, Any], *, bonus: float = 0.0) -> None:
        super().__init__(env)
        self.bonus = bonus

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, float(reward) + self.bonus, terminated, truncated, info


class Clock(gymnasium.Env[Any, Any]):
    """Observes `time.monotonic()`, which all processes of a machine share; never ends."""

    def __init__(self, *, step_s: float) -> None:
        self._step_s = step_s
        self.observation_space = spaces.Box(0.0, np.inf, (1,), np.float64)
        self.action_space = ACTION_SPACES["box"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array([time.monotonic()]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        return np.array([time.monotonic()]), 0.0, False, False, {}


class PicturedEnv(CountingEnv):
    """A CountingEnv that renders: its step as a gray tone."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # as gymnasium declares it

    def __init__(self, *, render_mode: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.render_mode = render_mode

    def render(self) -> Any:
        assert self.render_mode == "rgb_array"
        return np.full((48, 63, 3), 5 * self._counts.step % 256, np.uint8)


class Masked(gymnasium.Env[Any, Any]):
    """Of five actions, from 10 on, only the one after the last is legal, and the one after that. Refuses others."""

    action_space = spaces.Discrete(5, start=10)

    def __init__(self, *, in_info: bool = False) -> None:
        self._in_info = in_info
        self._box = spaces.Box(0, 100, (1,), np.float32)
        mask = spaces.Box(0, 1, (5,), np.int8)
        self.observation_space = self._box if in_info else spaces.Dict(observation=self._box, action_mask=mask)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._legal = {2, 3}
        return self._told({})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action - 10 not in self._legal:
            raise ValueError(f"action {action} is illegal; {self._legal} are legal")
        self._legal = {(action - 9) % 5, (action - 8) % 5}
        obs, info = self._told({"chosen": int(action)})
        return obs, 1.0, False, False, info

    def _told(self, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = np.array([i in self._legal for i in range(5)], np.int8)
        seen = np.zeros(1, np.float32)
        if self._in_info:
            return seen, info | {"action_mask": mask}
        return {"observation": seen, "action_mask": mask}, info


class MaskedAtTimes(gymnasium.Env[Any, Any]):
    """Only the last action is legal at even steps, and all are where the info has no mask. Can be saved."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self._told()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._steps % 2 == 0 and action.tolist() != [1, 2]:
            raise ValueError(f"action {action} is illegal")
        self._steps += 1
        return (told := self._told())[0], 1.0, self._steps == 5, False, told[1]

    def _told(self) -> tuple[Any, dict[str, Any]]:
        mask = (np.array([0, 1], np.int8), np.array([0, 0, 1], np.int8))
        return np.full(1, self._steps, np.float32), {"action_mask": mask} if self._steps % 2 == 0 else {}

    def get_state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def set_state(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
