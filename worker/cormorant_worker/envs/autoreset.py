"""When a gymnasium vector environment resets its rows, and whether it can reset some of them on request: as declared,
or determined by stepping it. Call `seed` afterwards.
"""

import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from cormorant_worker.envs.flat_vector import FlatVector, Stepped
from cormorant_worker.envs.protocol import Rows
from cormorant_worker.errors import EnvBuildError
from cormorant_worker.spaces import Array, Arrays

_MOST_STEPS = 5_000
_MOST_S = 30.0
"""For how long an environment that declares nothing is played until an episode ends."""
_TRIES = 4


def find_mode(vector: FlatVector) -> AutoresetMode:
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


def resets_some(vector: FlatVector, mode: AutoresetMode) -> bool:
    """True where `reset(options={"reset_mask": ...})` begins new episodes in some rows and leaves the others alone.
    If the test is inconclusive, the class or the mode decides.
    """
    is_known = _forgets_pending_resets(vector)
    if mode is AutoresetMode.NEXT_STEP and not is_known:
        return False
    if vector.num_envs == 1:
        return True  # all of them are reset
    does, why = is_known or mode is AutoresetMode.DISABLED, ""
    for seed in range(_TRIES):
        first = _copy(vector.seed(range(seed, seed + vector.num_envs)).obs)
        try:
            before = vector.step(vector.random_actions(np.random.default_rng(seed)))
            kept = _copy(before.obs)
            if len(before.ended) or same_rows(kept, first)[1:].all():
                continue
            mask = np.arange(vector.num_envs) == 0
            after = vector.arrays(vector.reset_some(mask)[0])
            does, why = bool(same_rows(after, kept)[1:].all()), "it resets every row"
        except Exception as error:  # noqa: BLE001 - whatever it raises, it takes no mask
            does, why = False, f"{type(error).__name__}: {error}"
        break
    if not does and mode is AutoresetMode.DISABLED:
        raise EnvBuildError(
            f'{vector.name} declares the autoreset_mode DISABLED, and reset(options={{"reset_mask": ...}}) does not '
            f"reset the rows of the mask alone: {why}; implement reset_mask, or declare another mode"
        )
    return does


def _forgets_pending_resets(vector: FlatVector) -> bool:
    """True where a reset of a row that ended replaces the one that its next step would be. Only known of classes that
    were read: AsyncVectorEnv without shared memory, for one, does both.
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
    actions, last = _play_to_end(vector)
    if last is None:
        raise EnvBuildError(f"{cannot}: none ended in {len(actions):,} steps of random actions; {do}")
    row = last.ended[:1]
    if "final_obs" in last.info:
        return AutoresetMode.SAME_STEP
    matters, ignored, generator = False, True, np.random.default_rng(1)
    for _ in range(_TRIES):
        one, other = vector.random_actions(generator), vector.random_actions(generator)
        starts = [_after(vector, [], action) for action in (one, other)]
        following = [_after(vector, actions, action) for action in (one, other)]
        matters |= _differ(starts[0], starts[1], row)
        ignored &= not _differ(following[0], following[1], row) and not following[0].reward[row].any()
    if matters and ignored:
        return AutoresetMode.NEXT_STEP
    why = (
        "the step after an end is one that acts: it resets in the same step and gives no final_obs, or not at all"
        if not ignored
        else "its actions change nothing in a first step"
    )
    raise EnvBuildError(f"{cannot}: {why}; {do}")


def _play_to_end(vector: FlatVector) -> tuple[list[Arrays], Stepped | None]:
    generator, actions = np.random.default_rng(0), list[Arrays]()
    until = time.monotonic() + _MOST_S
    vector.seed(range(vector.num_envs))
    while len(actions) < _MOST_STEPS and time.monotonic() < until:
        actions.append(vector.random_actions(generator))
        stepped = vector.step(actions[-1])
        if len(stepped.ended):
            return actions, stepped
    return actions, None


def _after(vector: FlatVector, actions: list[Arrays], last: Arrays) -> Stepped:
    vector.seed(range(vector.num_envs))
    for action in actions:
        vector.step(action)
    stepped = vector.step(last)
    return stepped._replace(obs=_copy(stepped.obs))


def _differ(one: Stepped, other: Stepped, row: Rows) -> bool:
    return not same_rows(one.obs, other.obs)[row].all() or one.reward[row] != other.reward[row]


def same_rows(one: Sequence[Array], other: Sequence[Array]) -> Array:
    """[N] bool: which rows are equal in every leaf."""
    equal = [(a == b).reshape(len(a), -1).all(axis=1) for a, b in zip(one, other, strict=True)]
    return np.asarray(np.stack(equal).all(axis=0))


def _copy(arrays: Arrays) -> Arrays:
    return tuple(array.copy() for array in arrays)
