"""Single environments, each of which crashes and is restarted alone. `SingleEnvs` is the base of those in this process
and of those in their own (`subprocess.py`). `InlineVectorEnv` is for debugging, for very cheap environments, and for
evaluations of vector environments: each episode is played in a vector of one row (`OneRow`), so that it depends on its
seed alone.

    built -> idle -> (send | reset | save | load) -> idle
    anywhere -> crash or time limit -> dead -> (its row is wanted) -> built again, with a new seed -> row fresh
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import gymnasium
import numpy as np
import structlog

from cormorant_worker.action_mask import ACTION_MASK
from cormorant_worker.envs.env_row import BadObservation, Crash, EnvArrays, EnvRow, EnvState, NanCheck, StepArrays
from cormorant_worker.envs.gymnasium_env import EnvSource, check_same, words_of
from cormorant_worker.envs.info import InfoField, complete_fields
from cormorant_worker.envs.protocol import EVERY_ROW, NO_ROWS, Rows, Step, VectorEnv
from cormorant_worker.envs.request import EnvRequest
from cormorant_worker.envs.restarts import RestartLimits, Restarts
from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvNotSaved, StateError, UnknownEnv
from cormorant_worker.spaces import Arrays, Space, flatten, unflattener

log = structlog.get_logger(__name__)

Running = TypeVar("Running")
"""Steps the environment of one row."""


class SingleEnvs(VectorEnv, Generic[Running]):
    """num_envs gymnasium environments, in lockstep. Used by one thread. `factory` builds each; environment i is first
    reset with `seeds[i]`, later without a seed; `limits` says how many restarts are too many; `info` which values come
    with every step. Raises UnknownEnv or EnvBuildError where one could not be built.
    """

    _last_side = 0
    """Steps are written into sides 0 to this one, in turn."""

    def __init__(
        self,
        factory: EnvSource,
        *,
        seeds: Sequence[int],
        limits: RestartLimits = RestartLimits(),  # noqa: B008 - frozen
        info: Sequence[InfoField] = (),
    ) -> None:
        self.num_envs = len(seeds)
        self._factory, self._info = factory, tuple(info)
        self._restarts = Restarts(seeds, limits)
        self._numbers = np.arange(self.num_envs)
        self._side = 0
        self._under_way: slice | Rows | None = None
        self._running: dict[int, Running] = {}
        """By row."""
        self._dead: dict[int, Crash] = {}
        """Rows without an environment; it is replaced when they are next wanted."""
        self._arrays: EnvArrays
        self._words = ""
        """Description of the spaces, once they are known."""
        self._starting, self._closed = True, False
        try:
            self._build(range(self.num_envs))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _build(self, rows: Iterable[int]) -> None:
        """Have environments built in these rows, and `_learn` what they are. Those that fail, here and in the next
        three, are told to `_lose`.
        """

    @abstractmethod
    def _reset(self, rows: Iterable[int], *, is_seeded: bool = False) -> None: ...

    @abstractmethod
    def _step(self, rows: slice | Rows) -> None:
        """Complete what `send` began."""

    @abstractmethod
    def _ask(self, states: Sequence[EnvState] = ()) -> Mapping[int, EnvState | str]:
        """By row, the answer of `EnvRow.load` to the states of all rows, or of `EnvRow.save` where there are none."""

    @abstractmethod
    def _end(self, row: int, running: Running) -> None: ...

    def _lay_out(self) -> EnvArrays:
        spaces = self.observation_space, self.action_space
        return EnvArrays(*spaces, self.num_envs, self._info, np.zeros, num_sides=1)

    @abstractmethod
    def _has_stepped(self) -> bool: ...

    @property
    def restarts(self) -> int:
        return self._restarts.count

    def start(self) -> Arrays:
        self._check_open()
        self._starting, self._under_way = True, None
        self._replace(list(self._dead))  # where this is not the first start
        self._reset(range(self.num_envs), is_seeded=True)
        self._starting = False
        obs = tuple(obs.copy() for obs in self._written.obs)
        self._nan.look(obs, EVERY_ROW)
        return obs

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        if self._closed or self._under_way is not None:
            self._check_idle("send")
        for target, values in zip(self._arrays.actions, actions, strict=True):
            target[rows] = values
        self._side = self._last_side - self._side
        self._under_way = rows

    def recv(self) -> Step:
        rows = self._under_way
        if rows is None:
            raise RuntimeError("recv was called without send")
        self._under_way = None
        self._step(rows)
        replaced = self._revive(rows) if self._dead else []
        arrays, numbers = self._arrays.sides[self._side], self._numbers[rows]
        terminated, truncated = arrays.terminated[rows], arrays.truncated[rows]
        ended = np.flatnonzero(terminated | truncated)
        obs = tuple([values[rows] for values in arrays.obs])
        final = tuple([values[numbers[ended]] for values in arrays.final])
        self._nan.look(obs, numbers)
        if ended.size:
            self._nan.look(final, numbers[ended])
        fresh = np.flatnonzero(np.isin(numbers, replaced)) if replaced else NO_ROWS
        info = tuple([values[rows] for values in arrays.info])
        return Step(rows, obs, arrays.reward[rows], terminated, truncated, ended, final, fresh, info)

    def restart(self, rows: Rows) -> Arrays:
        self._check_open()
        self._side = self._last_side - self._side
        self._reset([row for row in rows.tolist() if row not in self._dead])
        self._revive(rows)
        obs = tuple(obs[rows] for obs in self._written.obs)
        self._nan.look(obs, rows)
        return obs

    def state(self) -> bytes:
        """The environments' own states and the seeds. Raises EnvNotSaved, naming what one of them lacks, and EnvCrashed
        where one did not answer or its get_state raised.
        """
        self._check_idle("state")
        answers = self._ask()
        if self._dead:
            row, crash = min(self._dead.items())
            raise EnvCrashed(f"environment {row} could not be saved: it {crash.what}", details=crash.details)
        saved = [answers[row] for row in range(self.num_envs)]
        if why_not := next((answer for answer in saved if isinstance(answer, str)), ""):
            raise EnvNotSaved(why_not)
        # JSON, since it may come from a network, and never pickle.
        return json.dumps({"envs": saved, "restarts": self._restarts.state()}).encode()

    def restore(self, state: bytes) -> None:
        """Continue from `state()`. Raises StateError where it comes from other environments, or one refused it or did
        not answer. The others have taken theirs then: begin new episodes everywhere, with `restart`.
        """
        self._check_idle("restore")
        try:
            decoded = json.loads(state)
            envs, restarts = decoded["envs"], decoded["restarts"]
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"this is not a state of gymnasium environments: {error}") from error
        if len(envs) != self.num_envs:
            raise StateError(f"the state has {len(envs)} environments, this collector has {self.num_envs}")
        self._revive(EVERY_ROW)
        refusals = {row: why_not for row, why_not in self._ask(envs).items() if why_not}
        refusals |= {row: f"it {crash.what}" for row, crash in self._dead.items()}
        if refusals:
            row, why_not = min(refusals.items())
            raise StateError(f"environment {row} could not take its state: {why_not}")
        self._restarts.restore(**restarts)

    def _learn(self, row: int, observation: Space, action: Space, info: tuple[InfoField, ...]) -> None:
        """The environment of a row has been built: the first one says what all of them are like. `info`: complete."""
        words = words_of(observation, action) + "".join(
            f", {field.key} {field.dtype}{list(field.leaf.shape)} in info" for field in info
        )
        if not self._words:
            self._words, self._info = words, info
            self.observation_space, self.action_space = observation, action
            self.info_leaves = tuple(field.leaf for field in info)
            self._nan = NanCheck(observation)
            self._arrays = self._lay_out()
            self.illegal = self._arrays.illegal
        whose, called = f"the environments of {self._factory.name}", self._factory.called
        ours, own = (list(dict.fromkeys(name for field in of for name in field.agents)) for of in (self._info, info))
        if own != ours:
            raise EnvBuildError(
                f"{whose} differ in their agents or the order of them: {called(row)} has {', '.join(own)}; {called(0)} "
                f"has {', '.join(ours)}; make possible_agents agree, or set groupMap"
            )
        check_same(whose, [(called(0), self._words), (called(row), words)])

    def _replace(self, rows: Sequence[int]) -> None:
        """Build dead rows again; they may be dead again then."""
        for row in rows:
            self._restarts.record(self._dead.pop(row), has_stepped=self._has_stepped())
        self._build(rows)

    def _revive(self, rows: slice | Rows) -> list[int]:
        """Replace what is dead of `rows`, again where that fails. Returns the rows that have begun a new episode."""
        wanted, revived = set(self._numbers[rows].tolist()), set[int]()
        while dead := sorted(wanted & self._dead.keys()):
            self._replace(dead)
            self._reset([row for row in dead if row not in self._dead], is_seeded=True)
            revived.update(dead)
        arrays, fresh = self._written, sorted(revived)
        arrays.reward[fresh] = 0.0
        arrays.terminated[fresh] = arrays.truncated[fresh] = False
        return fresh

    def _lose(self, crash: Crash) -> None:
        """An environment has failed: its row is dead, unless no restart would help."""
        if crash.cause is UnknownEnv:
            raise UnknownEnv(crash.what)
        if crash.cause is BadObservation:
            has_stepped = self._restarts.has_stepped or crash.steps > 0 or self._has_stepped()
            raise EnvCrashed(crash.what, row=crash.row, has_stepped=has_stepped, details=crash.details)
        if self._starting:
            if crash.cause is EnvBuildError:
                raise EnvBuildError(crash.what, details=crash.details)
            raise EnvBuildError(
                f"environment {crash.row} ({self._factory.name}) {crash.what} before its first step",
                details=crash.details,
            )
        if crash.cause is not None:
            crash = replace(crash, what=f"could not be built again: {crash.what}")
        self._dead[crash.row] = crash
        if (running := self._running.pop(crash.row, None)) is not None:
            self._end(crash.row, running)

    @property
    def _written(self) -> StepArrays:
        return self._arrays.sides[self._side]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("these environments are closed")

    def _check_idle(self, what: str) -> None:
        self._check_open()
        if self._under_way is not None:
            raise RuntimeError(f"{what} was called while rows are in flight; call recv first")


class InlineVectorEnv(SingleEnvs[EnvRow]):
    """Environments in this thread. One that never returns, or takes the process down, cannot be restarted."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for row, env in self._running.items():
                self._end(row, env)

    def _build(self, rows: Iterable[int]) -> None:
        for row in rows:
            try:
                env = self._factory.build(row)
                info = complete_fields(self._info, env, self._factory.name)
            except Exception as error:  # noqa: BLE001 - whatever it raises, it is built again
                self._fail(row, error)
                continue
            self._learn(row, env.observation_space, env.action_space, info)
            self._running[row] = EnvRow(env, row, self._arrays, info)

    def _reset(self, rows: Iterable[int], *, is_seeded: bool = False) -> None:
        for row in rows:
            try:
                self._running[row].reset(seed=self._restarts.seeds[row] if is_seeded else None)
            except Exception as error:  # noqa: BLE001 - as in `_build`
                self._fail(row, error)

    def _step(self, rows: slice | Rows) -> None:
        running = self._running
        for row in self._numbers[rows].tolist():
            try:
                running[row].step()
            except Exception as error:  # noqa: BLE001 - as in `_build`
                self._fail(row, error)

    def _ask(self, states: Sequence[EnvState] = ()) -> Mapping[int, EnvState | str]:
        answers = dict[int, EnvState | str]()
        for row, env in tuple(self._running.items()):
            try:
                answers[row] = env.load(states[row]) if states else env.save()
            except Exception as error:  # noqa: BLE001 - as in `_build`
                self._fail(row, error)
        return answers

    def _has_stepped(self) -> bool:
        return any(env.steps for env in self._running.values())

    def _fail(self, row: int, error: BaseException) -> None:
        crash = Crash.of(error, row=row, steps=self._running[row].steps if row in self._running else 0)
        self._lose(replace(crash, error=error))

    def _end(self, row: int, env: EnvRow) -> None:
        try:
            env.env.close()
        except Exception:  # one that raises leaves no other one open
            log.warning("env_close_failed", env=row, exc_info=True)


class Reseeded(VectorEnv, Protocol):
    """A VectorEnv whose next `start` uses these seeds and options."""

    seeds: Sequence[int]
    options: dict[str, Any] | None = None
    """Options of the reset."""


class OneRow(gymnasium.Env[Any, Any]):
    """The only row of a vector environment."""

    def __init__(self, vector: Reseeded) -> None:
        self._vector = vector
        self.observation_space, self.action_space = vector.observation_space, vector.action_space
        self._nested = unflattener(self.observation_space)
        self._first: Arrays | None = None
        """The first observation of an episode that has begun already."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None or options or self._first is None:
            self._vector.seeds = self._vector.seeds if seed is None else (seed,)
            self._vector.options = options
            self._first = self._vector.start()
        first, self._first = self._first, None
        return self._nested([leaf[0].copy() for leaf in first]), self._mask()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        flat = tuple([np.asarray(part)[None] for part in flatten(self.action_space, action)])
        while True:
            self._vector.send(flat, EVERY_ROW)
            step = self._vector.recv()
            if len(step.reward):  # else the row is held back until the step that resets it
                break
        if len(step.ended):
            self._first = tuple([leaf.copy() for leaf in step.obs])
        obs = self._nested([leaf[0].copy() for leaf in (step.final if len(step.ended) else step.obs)])
        info = {leaf.key[-1]: column[0] for leaf, column in zip(self._vector.info_leaves, step.info, strict=True)}
        return obs, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), self._mask() | info

    def close(self) -> None:
        self._vector.close()

    def _mask(self) -> dict[str, Any]:
        return {} if self._vector.illegal is None else {ACTION_MASK: ~self._vector.illegal[0]}


class _Rows(EnvSource):
    def __init__(self, name: str, make: Callable[[], Reseeded]) -> None:
        self._name, self._make = name, make

    @property
    def name(self) -> str:
        return self._name

    def build(self, row: int) -> OneRow:  # the same for every row
        return OneRow(self._make())


def open_rows(
    request: EnvRequest, wrap: Callable[[EnvSource], EnvSource], name: str, make: Callable[[], Reseeded]
) -> VectorEnv:
    """One environment for each episode of an evaluation, in this process. `make`: returns a vector of one row."""
    return InlineVectorEnv(wrap(_Rows(name, make)), seeds=request.seeds, limits=request.limits, info=request.info)
