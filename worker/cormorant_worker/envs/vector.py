"""Environments that are vectorized already: any gymnasium `VectorEnv`, stepped in the worker's process.

    NEXT_STEP   the step after an end is a reset, whose action is ignored: ended rows are reset by a mask instead, or,
                where the environment cannot do that, held back until that step
    SAME_STEP   `final_obs` has the final observation, the first one of the next episode is returned
    DISABLED    ended rows are reset by a mask

A vector environment steps all of its rows. Where rows can be reset by a mask it is in lockstep, and rows that were not
sent are `interrupted`. Otherwise every row is always stepped, and the frames beyond a batch begin the next one.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from cormorant_worker.entrypoints import load_object
from cormorant_worker.envs.flat_vector import FlatVector, Stepped, VectorSource
from cormorant_worker.envs.gymnasium_env import EnvSource, name_of
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.protocol import EVERY_ROW, NO_ROWS, HeldEnds, Rows, Step, VectorEnv
from cormorant_worker.envs.request import EnvRequest, OpenedEnvs
from cormorant_worker.envs.single_envs import open_rows
from cormorant_worker.errors import EnvBuildError, EnvCrashed, ManifestError
from cormorant_worker.spaces import Array, Arrays, leaves, put, zeros

_MOST_STEPS = 5_000
_MOST_S = 30.0
"""For how long an environment that declares nothing is played until an episode ends."""
_TRIES = 4
_CHANCES = 3
"""Ends in a row that look as if the final observation were lost, where observations are whole numbers."""


class GymVectorEnv(FlatVector):
    """The rows of one gymnasium vector environment. `seeds`: one per row, for its first reset; `info`: values that come
    with every step. Raises UnknownEnv or EnvBuildError where it cannot be built, or its behavior at the end of an
    episode is unclear.
    """

    why_not_saved = "a gymnasium vector environment can neither save nor read its state"

    def __init__(self, source: VectorSource, *, seeds: Sequence[int], info: Sequence[InfoField] = ()) -> None:
        super().__init__(source, num_envs := len(seeds))
        self.seeds: Sequence[int] = tuple(seeds)
        self.options: dict[str, Any] | None = None
        try:
            self._mode = _find_mode(self)
            self.lockstep = _resets_some(self, self._mode)
            self.fields = self.complete(info)
        except BaseException:
            self.close()
            raise
        self.min_in_flight = 1 if self.lockstep else num_envs
        self.info_leaves = tuple(field.leaf for field in self.fields)
        if self._mode is AutoresetMode.SAME_STEP:
            self.device = self.place
        self._chances = 1 if any(leaf.dtype.kind == "f" for leaf in self.leaves) else _CHANCES
        self._looks_lost = 0
        self._no_final, self._before = zeros(self.leaves, 0), zeros(self.leaves, num_envs)
        self._actions = zeros(leaves(self.action_space, ("action",)), num_envs)
        """[N, ...] per leaf: those of this step, or of the last one where a step is only a reset."""
        self._rows: slice | Rows = EVERY_ROW
        self._is_interrupted: Array = np.zeros(num_envs, dtype=np.bool_)
        self._held = HeldEnds(num_envs, self.leaves, self.info_leaves)

    @property
    def interrupted(self) -> Rows:
        return np.flatnonzero(self._is_interrupted)

    def start(self) -> Arrays:
        return self._begin(self.seeds, self.options)

    def _begin(self, seeds: Sequence[int] | None = None, options: dict[str, Any] | None = None) -> Arrays:
        self._is_interrupted[:] = self._held.waits[:] = False
        if self._mode is AutoresetMode.NEXT_STEP and not _replaces_pending(self):
            self.settle()
        obs = self.begin(seeds, options).obs
        self._act_on(obs, EVERY_ROW)
        return obs

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        put(self._actions, rows, actions)
        self._rows = rows
        if self.lockstep and not isinstance(rows, slice):
            is_left_out = np.ones(self.num_envs, dtype=np.bool_)
            is_left_out[rows] = False
            self._is_interrupted |= is_left_out
            put(self._actions, is_left_out, tuple([leaf[is_left_out] for leaf in self.random_actions()]))

    def recv(self) -> Step:
        # Copies: the environment may keep them, and these are written again.
        stepped = self.step(tuple(action.copy() for action in self._actions))
        info = self.infos(stepped, is_same_step=self._mode is AutoresetMode.SAME_STEP)
        if not self.lockstep and self._mode is AutoresetMode.NEXT_STEP:
            # Rows that ended come with the next step, which is the first observation of their next episode.
            waits = self._held.waits
            if stepped.reward[waits].any() or (stepped.terminated | stepped.truncated)[waits].any():
                raise EnvCrashed(
                    f"{self.name} declares the autoreset_mode NEXT_STEP, and the step after an end had a "
                    "reward or ended; correct what it declares",
                    has_stepped=False,
                )
            return self._held.pass_on(np.arange(self.num_envs), stepped.obs, (*stepped[1:4], *info))
        obs, ended, final = stepped.obs, stepped.ended, self._no_final
        if len(ended):
            if self._mode is AutoresetMode.SAME_STEP:
                final = self.final(stepped)
                self._refuse_lost(final, [leaf[ended] for leaf in obs], [leaf[ended] for leaf in self._before])
            else:
                final = tuple(leaf[ended] for leaf in obs)
                obs = tuple(leaf.copy() for leaf in obs)
                put(obs, ended, self.reset(ended))
        self._act_on(obs, EVERY_ROW)
        if isinstance(rows := self._rows, slice) or not self.lockstep:
            return Step(EVERY_ROW, obs, *stepped[1:4], ended, final, NO_ROWS, info)
        sent = np.flatnonzero((stepped.terminated | stepped.truncated)[rows])
        final = tuple(leaf[np.searchsorted(ended, rows[sent])] for leaf in final)
        obs, info = (tuple(leaf[rows] for leaf in leaves) for leaves in (obs, info))
        reward, terminated, truncated = (column[rows] for column in stepped[1:4])
        return Step(rows, obs, reward, terminated, truncated, sent, final, NO_ROWS, info)

    def check_steps(self, obs: Arrays, reward: Array, at: tuple[Array, Array], final: Arrays) -> None:
        self.nan.check_steps(obs, reward, at, final)
        steps, rows = at
        if len(rows):
            self._refuse_lost(final, [leaf[steps + 1, rows] for leaf in obs], [leaf[steps, rows] for leaf in obs])
        self._act_on(tuple(leaf[-1] for leaf in obs), EVERY_ROW)

    def restart(self, rows: Rows) -> Arrays:
        if not self.lockstep:
            return self._begin()  # in all rows, which is what `open_envs` leaves
        self._is_interrupted[rows] = False
        first = self.reset(rows)
        self._act_on(first, rows)
        return first

    def _refuse_lost(self, final: Arrays, first: Sequence[Array], before: Sequence[Array]) -> None:
        """Compare final observations [k, ...] with the first ones of the next episodes, and with those acted on. An
        environment that returns the same object each time gives a final observation that its reset overwrote: the first
        one of the next episode, which by chance has never been the last of this one.
        """
        for looks in (_same_rows(final, first) & ~_same_rows(final, before)).tolist():
            self._looks_lost = self._looks_lost + 1 if looks else 0
            if self._looks_lost >= self._chances:
                raise self.lost_final("returns final_obs that equals the first observation of the next episode")

    def _act_on(self, obs: Arrays, rows: slice | Rows) -> None:
        """Keep what is acted on next, where it is compared with final observations."""
        if self._mode is AutoresetMode.SAME_STEP:
            put(self._before, rows, obs)


def _find_mode(vector: FlatVector) -> AutoresetMode:
    """The declared mode, else the observed one. Raises EnvBuildError where that is unclear."""
    env = vector.env
    # An environment's own attribute comes first: ALE's writes the mode into a dict that every class shares.
    unwrapped = getattr(env, "unwrapped", env)
    declared = getattr(unwrapped, "autoreset_mode", None)
    if declared is None and getattr(unwrapped, "metadata", None) is not gymnasium.vector.VectorEnv.metadata:
        declared = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    if declared is None:
        return _play_for_mode(vector)
    for mode in AutoresetMode:
        if declared in (mode, mode.value, mode.name):
            return mode
    known = ", ".join(mode.name for mode in AutoresetMode)
    raise EnvBuildError(f"{vector.name} declares the autoreset_mode {declared!r}; known: {known}")


def _resets_some(vector: FlatVector, mode: AutoresetMode) -> bool:
    """True where `reset(options={"reset_mask": ...})` begins new episodes in some rows and leaves the others alone.
    If the test is inconclusive, the class or the mode decides.
    """
    replaces = _replaces_pending(vector)
    if mode is AutoresetMode.NEXT_STEP and not replaces:
        return False
    if vector.num_envs == 1:
        return True  # all of them are reset
    kind = type(getattr(vector.env, "unwrapped", vector.env))
    is_own = kind.reset not in (SyncVectorEnv.reset, AsyncVectorEnv.reset)
    is_own &= issubclass(kind, SyncVectorEnv | AsyncVectorEnv)
    does, why = (replaces and not is_own) or mode is AutoresetMode.DISABLED, ""
    for seed in range(_TRIES):
        first = _copy(vector.begin(range(seed, seed + vector.num_envs)).obs)
        try:
            before = vector.step(vector.random_actions())
            kept, others = _copy(before.obs), ~(before.terminated | before.truncated)
            others[0] = False
            if _same_rows(kept, first)[others].all():
                continue
            mask = np.arange(vector.num_envs) == 0
            after = vector.arrays(vector.reset_some(mask)[0])
            does, why = bool(_same_rows(after, kept)[others].all()), "it resets every row"
        except Exception as error:  # whatever it raises, it takes no mask
            if isinstance(error, EnvCrashed) and isinstance(vector.env, AsyncVectorEnv):
                raise  # in the step: its processes are gone, and say nothing more of that
            does, why = False, f"{type(error).__name__}: {error}"
        break
    if not does and mode is AutoresetMode.DISABLED:
        raise EnvBuildError(
            f'{vector.name} declares the autoreset_mode DISABLED, and reset(options={{"reset_mask": ...}}) does not '
            f"reset the rows of the mask alone: {why}; implement reset_mask, or declare another mode"
        )
    return does


def _replaces_pending(vector: FlatVector) -> bool:
    """True where a reset of a row that ended replaces the one that its next step would be. Only known of classes that
    were read, and of those derived from them: AsyncVectorEnv without shared memory, for one, does both.
    """
    env: Any = getattr(vector.env, "unwrapped", vector.env)
    if isinstance(env, AsyncVectorEnv):
        return bool(env.shared_memory)
    return isinstance(env, SyncVectorEnv) or type(env).__module__.partition(".")[0] == "ale_py"


def _play_for_mode(vector: FlatVector) -> AutoresetMode:
    """SAME_STEP gives `final_obs`. NEXT_STEP ignores the action after an end, where other actions matter; without
    `final_obs`, an action that matters there is the first of an episode whose predecessor's end was lost.
    """
    cannot = f"{vector.name} declares no autoreset_mode, and its behavior at the end of an episode is unclear"
    do = 'set env.metadata["autoreset_mode"] to NEXT_STEP, SAME_STEP or DISABLED'
    actions, until = list[Arrays](), time.monotonic() + _MOST_S
    vector.begin(range(vector.num_envs))
    last: Stepped | None = None
    while last is None or not len(last.ended):
        if len(actions) == _MOST_STEPS or time.monotonic() >= until:
            raise EnvBuildError(f"{cannot}: none ended in {len(actions):,} steps of random actions; {do}")
        actions.append(vector.random_actions())
        last = vector.step(actions[-1])
    row = last.ended[:1]
    if "final_obs" in last.info:
        return AutoresetMode.SAME_STEP
    matters, ignored = False, True
    for _ in range(_TRIES):
        matters |= _matters_after(vector, [], row)[0]
        ignored &= not any(_matters_after(vector, actions, row))
    if matters and ignored:
        return AutoresetMode.NEXT_STEP
    raise EnvBuildError(f"{cannot}: it gives no final_obs, and the step after an end is not seen to be a reset; {do}")


def _matters_after(vector: FlatVector, actions: list[Arrays], row: Rows) -> tuple[bool, bool]:
    """Whether two random steps after these actions differ in the row, and whether the first one has a reward there."""
    steps = []
    for _ in range(2):
        vector.begin(range(vector.num_envs))
        for action in actions:
            vector.step(action)
        stepped = vector.step(vector.random_actions())
        steps.append((stepped.reward[row], tuple(leaf[row] for leaf in stepped.obs)))  # copies
    (reward, obs), (other, following) = steps
    return bool(reward != other or not _same_rows(obs, following).all()), bool(reward.any())


def _same_rows(one: Sequence[Array], other: Sequence[Array]) -> Array:
    """[N] bool: which rows are equal in every leaf."""
    equal = [(a == b).reshape(len(a), -1).all(axis=1) for a, b in zip(one, other, strict=True)]
    return np.asarray(np.stack(equal).all(axis=0))


def _copy(arrays: Arrays) -> Arrays:
    return tuple(array.copy() for array in arrays)


def open_envs(request: EnvRequest) -> OpenedEnvs:
    """All rows in one group."""
    vector = GymVectorEnv(_source(request), seeds=request.seeds, info=request.info)
    if request.begins and not vector.lockstep:
        vector.close()
        raise ManifestError(
            f"spec.collection.{request.begins} needs rows of {request.env.name} to be reset alone, and "
            f'reset(options={{"reset_mask": ...}}) does not do that there; remove {request.begins}, or implement '
            "reset_mask"
        )
    return OpenedEnvs((vector,))


def open_episodes(request: EnvRequest, wrap: Callable[[EnvSource], EnvSource]) -> VectorEnv:
    """A vector environment of one row for each episode."""
    source = _source(request)
    return open_rows(request, wrap, source.name, lambda: GymVectorEnv(source, seeds=(0,), info=request.info))


def _source(request: EnvRequest) -> VectorSource:
    block = request.env.vector
    assert block is not None
    name = block.id or block.entrypoint or ""
    if request.makers:
        make: Callable[..., Any] = request.makers[0]
        name = name_of(make)
    else:
        make = partial(gymnasium.make_vec, name) if block.id else load_object(name, what="environment")
    return VectorSource(name, lambda num_envs: make(num_envs=num_envs, **block.kwargs))
