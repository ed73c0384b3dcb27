"""Environments that are vectorized already: any gymnasium `VectorEnv`, stepped in the worker's process.

    NEXT_STEP   the step after an end is a reset, whose action is ignored: ended rows are reset by a mask instead, or,
                where the environment cannot do that, held back until that step
    SAME_STEP   `final_obs` has the final observation, the first one of the next episode is returned
    DISABLED    ended rows are reset by a mask

A vector environment steps all of its rows. Where rows can be reset by a mask it is in lockstep, and rows that were not
sent are `interrupted`. Otherwise every row is always stepped, and the frames beyond a batch begin the next one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from cormorant_worker.envs.autoreset import find_mode, resets_some, same_rows
from cormorant_worker.envs.flat_vector import FlatVector, Stepped, VectorSource
from cormorant_worker.envs.gymnasium_env import EnvSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.one_row import open_rows
from cormorant_worker.envs.protocol import EVERY_ROW, NO_ROWS, Rows, Step, VectorEnv, WholeStep
from cormorant_worker.envs.request import EnvRequest, OpenedEnvs
from cormorant_worker.errors import EnvCrashed, ManifestError
from cormorant_worker.spaces import Array, Arrays, put

_CHANCES = 3
"""Ends in a row that look as if the final observation were lost, where observations are whole numbers."""


class GymVectorEnv(VectorEnv):
    """The rows of one gymnasium vector environment. `seeds`: one per row, for its first reset; `info`: values that come
    with every step. Raises UnknownEnv or EnvBuildError where it cannot be built, or its behavior at the end of an
    episode is unclear.
    """

    why_not_saved = "a gymnasium vector environment can neither save nor read its state"

    def __init__(self, source: VectorSource, *, seeds: Sequence[int], info: Sequence[InfoField] = ()) -> None:
        num_envs = self.num_envs = len(seeds)
        vector = self._vector = FlatVector(source, num_envs)
        self.seeds: Sequence[int] = tuple(seeds)
        self.options: dict[str, Any] | None = None
        try:
            self._mode = find_mode(vector)
            self.lockstep = resets_some(vector, self._mode)
            self._info = vector.complete(info)
        except BaseException:
            vector.close()
            raise
        self.min_in_flight = 1 if self.lockstep else num_envs
        self.observation_space, self.action_space = vector.observation_space, vector.action_space
        self.info_leaves, self.illegal = tuple(field.leaf for field in self._info), vector.illegal
        if self._mode is AutoresetMode.SAME_STEP:
            self.device = vector.device
        self._chances = 1 if any(leaf.dtype.kind == "f" for leaf in vector.leaves) else _CHANCES
        self._looks_lost = 0
        self._no_final = tuple(np.empty((0, *leaf.shape), leaf.dtype) for leaf in vector.leaves)
        self._actions = tuple(action.copy() for action in vector.random_actions(np.random.default_rng(0)))
        """[N, ...] per leaf: the last ones of every row, which are valid where they mean nothing."""
        self._before: Arrays = ()
        self._rows: slice | Rows = EVERY_ROW
        self._is_interrupted: Array = np.zeros(num_envs, dtype=np.bool_)
        self._held: Stepped | None = None
        """Results of rows that ended and whose next step is a reset."""
        self._held_final, self._held_info = self._no_final, tuple[Array, ...]()

    @property
    def interrupted(self) -> Rows:
        return np.flatnonzero(self._is_interrupted)

    def start(self) -> Arrays:
        self._is_interrupted[:] = False
        self._held = None
        if self._mode is AutoresetMode.NEXT_STEP:
            self._vector.settle()
        obs = self._vector.seed(self.seeds, self.options).obs
        self._before = tuple(np.empty_like(leaf) for leaf in obs)
        self._act_on(obs, EVERY_ROW)
        return obs

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        put(self._actions, rows, actions)
        self._rows = rows
        if self.lockstep and not isinstance(rows, slice):
            is_left_out = np.ones(self.num_envs, dtype=np.bool_)
            is_left_out[rows] = False
            self._is_interrupted |= is_left_out

    def recv(self) -> Step:
        # Copies: the environment may keep them, and these are written again.
        stepped = self._vector.step(tuple(action.copy() for action in self._actions))
        info = self._vector.infos(self._info, stepped, is_same_step=self._mode is AutoresetMode.SAME_STEP)
        if not self.lockstep and self._mode is AutoresetMode.NEXT_STEP:
            return self._recv_held(stepped, info)
        obs, ended, final = stepped.obs, stepped.ended, self._no_final
        if len(ended):
            if self._mode is AutoresetMode.SAME_STEP:
                final = self._take_final(stepped)
            else:
                final = tuple(leaf[ended] for leaf in obs)
                obs = tuple(leaf.copy() for leaf in obs)
                put(obs, ended, self._vector.reset(ended))
        self._act_on(obs, EVERY_ROW)
        if isinstance(rows := self._rows, slice) or not self.lockstep:
            return Step(EVERY_ROW, obs, *stepped[1:4], ended, final, NO_ROWS, info)
        sent = np.flatnonzero((stepped.terminated | stepped.truncated)[rows])
        final = tuple(leaf[np.searchsorted(ended, rows[sent])] for leaf in final)
        return _of_rows(rows, stepped, obs, sent, final, info)

    def step_tensors(self, actions: Sequence[Any]) -> WholeStep:
        return self._vector.step_tensors(actions, self._info)

    def check_steps(self, obs: Arrays, reward: Array, at: tuple[Array, Array], final: Arrays) -> None:
        self._vector.nan.check_steps(obs, reward, at, final)
        steps, rows = at
        if len(rows):
            self._refuse_lost(final, [leaf[steps + 1, rows] for leaf in obs], [leaf[steps, rows] for leaf in obs])
        self._act_on(tuple(leaf[-1] for leaf in obs), EVERY_ROW)

    def restart(self, rows: Rows) -> Arrays:
        if not self.lockstep:
            raise EnvCrashed(f"the rows of {self._vector.name} cannot be restarted one by one: it takes no reset_mask")
        self._is_interrupted[rows] = False
        first = self._vector.reset(rows)
        self._act_on(first, rows)
        return first

    def close(self) -> None:
        self._vector.close()

    def _take_final(self, stepped: Stepped) -> Arrays:
        """[k, ...] per leaf: `final_obs` of an environment that resets in the same step.

        An environment that returns the same object each time gives a final observation that its reset overwrote: the
        first one of the next episode, which by chance has never been the last of this one.
        """
        final, ended = self._vector.final(stepped), stepped.ended
        if final is None:
            raise self._vector.no_final()
        self._refuse_lost(final, [leaf[ended] for leaf in stepped.obs], [leaf[ended] for leaf in self._before])
        return final

    def _refuse_lost(self, final: Arrays, first: Sequence[Array], before: Sequence[Array]) -> None:
        """Compare final observations [k, ...] with the first ones of the next episodes, and with those acted on."""
        for looks in (same_rows(final, first) & ~same_rows(final, before)).tolist():
            self._looks_lost = self._looks_lost + 1 if looks else 0
            if self._looks_lost >= self._chances:
                raise self._vector.lost_final("that equals the first observation of the next episode")

    def _act_on(self, obs: Arrays, rows: slice | Rows) -> None:
        """Keep what is acted on next, where it is compared with final observations."""
        if self._mode is AutoresetMode.SAME_STEP:
            put(self._before, rows, obs)

    def _recv_held(self, stepped: Stepped, info: Arrays) -> Step:
        """Rows that ended come with the next step, which is the first observation of their next episode."""
        begins, held = np.zeros(self.num_envs, dtype=np.bool_), self._held
        if held is not None:
            begins[held.ended] = True
            if stepped.reward[begins].any() or (stepped.terminated | stepped.truncated)[begins].any():
                raise EnvCrashed(
                    f"{self._vector.name} declares the autoreset_mode NEXT_STEP, and the step after an end had a "
                    "reward or ended; correct what it declares",
                    has_stepped=False,
                )
            for now, kept in zip((*stepped[1:4], *info), (*held[1:4], *self._held_info), strict=True):
                now[begins] = kept[begins]
        ends = (stepped.terminated | stepped.truncated) & ~begins
        ended, final = NO_ROWS, self._no_final
        rows: Rows = np.flatnonzero(~ends)
        if held is not None:
            ended, final = np.flatnonzero(begins[~ends]), self._held_final
        self._held = None
        if ends.any():
            self._held = stepped._replace(terminated=stepped.terminated & ends, truncated=stepped.truncated & ends)
            self._held_final = tuple(leaf[ends] for leaf in stepped.obs)
            self._held_info = info
        return _of_rows(rows, stepped, stepped.obs, ended, final, info)


def _of_rows(rows: Rows, stepped: Stepped, obs: Arrays, ended: Rows, final: Arrays, info: Arrays) -> Step:
    """Select some rows of a step of all; `ended` and `final` are of these."""
    obs, info = (tuple(leaf[rows] for leaf in leaves) for leaves in (obs, info))
    flags = stepped.terminated[rows], stepped.truncated[rows]
    return Step(rows, obs, stepped.reward[rows], *flags, ended, final, NO_ROWS, info)


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
    return VectorSource(
        id=block.id or "",
        entrypoint=block.entrypoint or "",
        make=request.makers[0] if request.makers else None,
        kwargs=dict(block.kwargs),
    )
