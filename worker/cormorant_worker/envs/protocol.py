"""The interface of environments for the hot loop, however they are stepped (EnvPool, subprocesses, this process).

Autoreset is *same-step with the true final observation*: a row that ended carries its final observation in `final`
and the first observation of the next episode in `obs`. No phantom step ever leaves an implementation.

Life of one environment:

    start() -> IDLE -> send -> STEPPING -> recv -> IDLE -> ...          (lockstep: every sent row comes back at once)
    start() -> send -> STEPPING -> recv (those that are ready) -> send ...  (not lockstep)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cormorant_worker.errors import EnvBuildError, EnvCrashed, EnvNotSaved
from cormorant_worker.spaces import Array, Arrays, Leaf, Space, describe, put, zeros

if TYPE_CHECKING:
    import torch

    from cormorant_worker.policy.jax_policy import JaxPolicy

Rows = npt.NDArray[np.int64]
"""Numbers of environments within one VectorEnv, 0 <= row < num_envs, without duplicates."""

EVERY_ROW = slice(None)
"""Stands for rows 0..num_envs-1 in order: lets the hot loop write with a slice instead of an index."""

NO_ROWS: Rows = np.empty(0, dtype=np.int64)


class Step(NamedTuple):
    """Steps of some rows since they were sent. n rows; k of them ended; f of them are fresh.

    Arrays belong to the receiver until the next `recv` of the same environment; it copies what it keeps.
    """

    rows: slice | Rows
    """Numbers of the environments: EVERY_ROW, or [n]."""
    obs: Arrays
    """[n, ...] per leaf: what to act on next. For an ended row, the first observation of its next episode."""
    reward: Array
    """[n] float32."""
    terminated: Array
    """[n] bool."""
    truncated: Array
    """[n] bool."""
    ended: Rows
    """[k] positions (0 <= p < n, ascending) where terminated or truncated."""
    final: Arrays
    """[k, ...] per leaf: the last observation of the episodes that ended, in the order of `ended`."""
    fresh: Rows = NO_ROWS
    """[f] positions that carry no transition, only a first observation in `obs`: the environment was restarted
    after a crash or a hang. Its open trajectory ends truncated at its last stored frame; nothing else is stored."""
    info: Arrays = ()
    """[n, ...] per leaf of `VectorEnv.info_leaves`: of this step, for an ended row too. Undefined in fresh rows."""


class HeldEnds:
    """Transitions of rows that ended, kept until their next step, which is only a reset: it shows the first observation
    of their next episode.
    """

    def __init__(self, num_envs: int, observation: Sequence[Leaf], info: Sequence[Leaf]) -> None:
        self.waits: Array = np.zeros(num_envs, np.bool_)
        """[num_envs] rows whose next step is only a reset."""
        self._final = zeros(observation, num_envs)
        flags = np.zeros((2, num_envs), np.bool_)
        self._columns: Arrays = (np.zeros(num_envs, np.float32), *flags, *zeros(info, num_envs))

    def pass_on(self, rows: Rows, obs: Arrays, columns: Arrays) -> Step:
        """The step of `rows` [n], without those that ended in it, and with those that had ended in the one before.
        `columns`: reward, terminated, truncated and info, [n, ...] each.
        """
        begins = self.waits[rows]
        ends = (columns[1] | columns[2]) & ~begins
        put(self._final, rows[ends], tuple([leaf[ends] for leaf in obs]))
        put(self._columns, rows[ends], tuple([column[ends] for column in columns]))
        self.waits[rows] = ends
        ready = ~ends
        rows, begun = rows[ready], np.flatnonzero(begins[ready])
        now = reward, terminated, truncated, *info = tuple([column[ready] for column in columns])
        put(now, begun, tuple([kept[rows[begun]] for kept in self._columns]))
        final = tuple([kept[rows[begun]] for kept in self._final])
        seen = tuple([leaf[ready] for leaf in obs])
        return Step(rows, seen, reward, terminated, truncated, begun, final, NO_ROWS, tuple(info))


class WholeStep(NamedTuple):
    """One step of all N rows as tensors `[N, ...]`, or K of them as arrays `[K, N, ...]`, before anybody looked which
    rows ended.
    """

    obs: Sequence[Any]
    """Per leaf: what to act on next. For an ended row, the first observation of its next episode."""
    seen: Sequence[Any]
    """Per leaf: for an ended row, its final observation; elsewhere anything."""
    reward: Any
    terminated: Any
    truncated: Any
    info: Sequence[Any] = ()


class VectorEnv(Protocol):
    """num_envs environments of one kind, stepped together. Used by one thread.

    A kind of environment inherits it: it sets the first three attributes, and implements `start`, `send`, `recv`,
    `restart` and `close`. The defaults are: lockstep, no info, no restarts, no states.
    """

    num_envs: int
    observation_space: Space
    """Space of one environment."""
    action_space: Space
    """Space of one environment."""
    info_leaves: tuple[Leaf, ...] = ()
    """Leaves of `info` in every step; usually none."""
    illegal: Array | None = None
    """[num_envs, length] bool: actions that the `action_mask` in the info of each idle environment's last step or reset
    forbids next; None: infos are not searched for it. For `length` see `action_mask.mask_length`."""
    lockstep: bool = True
    """True when `recv` returns exactly the rows of the last `send`, in that order."""
    min_in_flight: int = 1
    """`recv` may block indefinitely with fewer rows in flight than this; 1 when lockstep."""
    device: "torch.device | None" = None
    """Where `step_tensors` steps without the host; None: it cannot."""
    scan_length: int = 0
    """The most steps K of one `scan`; 0: it cannot."""
    why_not_saved: str = "these environments have no states"
    """Why environments cannot be saved, if `state` is not implemented."""

    @property
    def restarts(self) -> int:
        """Number of environments restarted so far after a crash or a hang."""
        return 0

    @property
    def interrupted(self) -> Rows:
        """[k] idle rows that were stepped without an action because the environment cannot step only some of its rows:
        restart them before they are sent again.
        """
        return NO_ROWS

    def start(self) -> Arrays:
        """Begin the first episode everywhere. Returns the first observations, [num_envs, ...] per leaf."""

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Begin to step `rows` with `actions` ([n, ...] per leaf, in the order of rows). Returns at once.

        A row that is in flight must not be sent again.
        """

    def recv(self) -> Step:
        """Wait for rows that were sent, within the implementation's own limit. Raises EnvCrashed where they failed."""

    def step_tensors(self, actions: "Sequence[torch.Tensor]") -> WholeStep:
        """Step every row with `actions` [N, ...] per leaf, which are its own. The tensors that it returns belong to the
        receiver until the next step; the device may still be computing them.
        """
        raise EnvCrashed("these environments do not step on a device")

    def scan(
        self, obs: Arrays, num_steps: int, given: Array | None, policy: "JaxPolicy | None" = None
    ) -> tuple[Any, WholeStep]:
        """Step every row K times, from where they show `obs` [N, ...], with the actions `given` [K, N, ...], or with a
        policy's, one of the keys given [K, 2] a step; None: with its best ones. Returns [K, N, ...] what the policy
        chose, as its function returns it, or the actions, and the steps.
        """
        raise EnvCrashed("these environments do not scan")

    def check_steps(self, obs: Arrays, reward: Array, at: tuple[Array, Array], final: Arrays) -> None:
        """Check the results of K steps of `step_tensors` or `scan`, as `recv` checks its own.

        Args:
            obs: [K + 1, N, ...] per leaf: row k is what step k acted on.
            reward: [K, N].
            at: steps [k] and rows [k] at which episodes ended.
            final: [k, ...] per leaf: their final observations.

        Raises:
            BadObservation: NaN, or a final observation that is none.
        """
        return

    def restart(self, rows: Rows) -> Arrays:
        """Begin a new episode in idle `rows`, whatever state they are in; where not in lockstep, in all rows, dropping
        steps in flight. Returns [n, ...] first observations.
        """

    def state(self) -> bytes:
        """Everything needed to continue from here bit by bit. Raises EnvNotSaved where there is no such thing."""
        raise EnvNotSaved(self.why_not_saved)

    def restore(self, state: bytes) -> None:
        """Continue from a `state()` of an equal VectorEnv. Nothing may be in flight."""
        raise EnvCrashed(f"nothing can be restored: {self.why_not_saved}")

    def close(self) -> None:
        """Stop everything that was started. May be called twice."""


def same_spaces(envs: Sequence[VectorEnv]) -> tuple[Space, Space]:
    """Observation and action space of environments of one collector. Raises EnvBuildError where they differ."""
    spaces = {(describe(env.observation_space), describe(env.action_space)) for env in envs}
    if len(spaces) != 1:
        raise EnvBuildError(f"the environments of one collector have different spaces: {sorted(spaces)}")
    if len({env.info_leaves for env in envs}) != 1:
        infos = [[f"{leaf.key[-1]} {leaf.dtype.name}{list(leaf.shape)}" for leaf in env.info_leaves] for env in envs]
        raise EnvBuildError(
            f"the environments of one collector have different info: {infos}; declare dtypes in env.info"
        )
    return envs[0].observation_space, envs[0].action_space
