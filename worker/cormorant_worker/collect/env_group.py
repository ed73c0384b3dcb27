"""An EnvGroup: environments that step together and fill some columns of the block. The inner half of the hot loop.

With two groups, one steps while the policy is called for the other. With an inference server, `act` sends the rows to
it, and `land` receives the actions and forwards them. `at` is the index of a step's frames in arrays [T, n, ...]: a row
while all columns are at the same one, which is written with plain slices, otherwise rows and columns [k] each (a
restarted environment lags by one row; the last row of a short batch does not cover every column).

# T rows, n columns of this group, k of them at a time
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.collect.timing import Laps
from cormorant_worker.collect.trajectories import Trajectories
from cormorant_worker.envs.protocol import EVERY_ROW, Step, VectorEnv
from cormorant_worker.errors import EnvError
from cormorant_worker.inference.remote_actor import Asked, RemoteActor
from cormorant_worker.policy.action_check import ActionCheck
from cormorant_worker.policy.actor import Acted, Actor
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays, put
from cormorant_worker.weights.staged import RANDOM_VERSION, StagedWeights

At = int | tuple[Array, Array]


class EnvGroup(ABC):
    """Some columns of the block and the environments that fill them: begin, (act, land)* until done, finish."""

    def __init__(
        self,
        env: VectorEnv,
        columns: slice,
        trajectories: Trajectories,
        check: ActionCheck,
        *,
        random: RandomActor,
        remote: RemoteActor | None,
        max_frames: int,
    ) -> None:
        """Take environments that have not started, and their `columns` of the block. `random` draws the random actions,
        and is told which ones are illegal; `remote` is the actor where an inference server acts; `max_frames` is of a
        trajectory, in lockstep, 0: any number.
        """
        self.env = env
        self.columns = columns
        self.laps: Laps | None = None
        """Times `act` and `land`; None: they are not timed."""
        self.quota: Array = np.zeros(env.num_envs, dtype=np.int64)
        """[n] rows for each column."""
        self.is_init: Array = np.ones(env.num_envs, dtype=np.bool_)
        """[n] True where the next frame is the first of its trajectory."""
        self._trajectories = trajectories
        self._check = check
        self._random = random
        self._remote = remote
        self._max_frames = max_frames
        self._asked: Asked | None = None
        """Rows at the server: those of `_acting`."""
        self._acting: tuple[slice | Array, At, At] = EVERY_ROW, 0, 0
        """Columns that act, where their frames are written, and where what follows them is."""
        self._is_under_way = False
        """Actions were sent, and nothing was received since."""
        self._limits: Array = np.zeros(env.num_envs, dtype=np.int64)
        """[n] rows of the block at which the trajectories have their `max_frames`."""
        self._ids = trajectories.ids[columns]
        self._initial_states: Arrays = ()
        self.hidden: Arrays = ()
        """[n] each state that is carried and not stored, as it is now."""

    @abstractmethod
    def start(self, initial_states: Arrays, layout: Layout) -> None:
        """Begin the first episodes. `initial_states`: see `Actor`."""
        self._initial_states = initial_states
        self.hidden = tuple(value.repeat(self.env.num_envs, 0) for value in initial_states[len(layout.states) :])

    @abstractmethod
    def restart(self) -> None:
        """Begin a new trajectory everywhere, between batches."""

    @abstractmethod
    def begin(self, block: Block, quota: Array) -> None:
        """Write to this block from now on."""

    @abstractmethod
    def pending(self) -> Arrays | None:
        """[n, ...] observations and states that the next batch begins with; None: some of its frames have landed."""

    @abstractmethod
    def go_on(self, pending: Arrays) -> None:
        """Begin the next batch with these observations and states."""

    def take_rollout(self, block: Block, num_rows: int, rows: Array, columns: Array, final: Arrays) -> None:
        """Instead of begin, (act, land)* and finish, where a rollout has written the frames of every column: write what
        depends on the ends of episodes, [k] each in the order of rows.
        """
        ended = block.terminated[:num_rows] | block.truncated[:num_rows]
        block.is_init[0], block.is_init[1:num_rows] = self.is_init, ended[:-1]
        self.is_init[:] = ended[-1]
        # An id is higher than those before it, so the highest so far is a column's open one.
        ids = np.zeros((num_rows + 1, len(self._ids)), np.int64)
        ids[0], ids[rows + 1, columns] = self._ids, self._trajectories.new_ids(len(rows))
        np.maximum.accumulate(ids, axis=0, out=ids)
        block.traj_ids[:num_rows], self._ids[:] = ids[:-1], ids[-1]
        block.end(rows, columns, (*final, *(a[rows + 1, columns] for a in block.states)))
        put(block.states, (rows + 1, columns), self._initial_states)
        self.quota[:] = num_rows
        self.go_on(tuple(a[num_rows].copy() for a in block.observation + block.states))

    @property
    @abstractmethod
    def landed(self) -> Array:
        """[n] frames of each column that have landed in this batch, including those beyond its quota."""

    @property
    def is_done(self) -> bool:
        """True when every column has its quota."""
        return bool((self.landed >= self.quota).all())

    @abstractmethod
    def act(self, actor: Actor, version: int) -> None:
        """Choose and send the next actions, or send the rows to the server. Returns at once."""

    @abstractmethod
    def land(self) -> int:
        """Wait for the steps and write them. Returns the number of frames."""

    def stop(self, columns: Array | slice) -> None:
        """End the batch of these columns with the frames that have landed."""
        self.quota[columns] = np.minimum(self.quota[columns], self.landed[columns])

    def ends_ahead(self) -> list[tuple[int, int]]:
        """Ends of trajectories that have landed and are not handed over yet, oldest first: (column, number of
        frames up to and including the end).
        """
        return []

    @abstractmethod
    def finish(self) -> None:
        """Complete the batch: keep the start of the next one."""

    @abstractmethod
    def look(self, column: int, leaf: int) -> Array:
        """A copy of one leaf of a column's next observation. May be called from other threads: while a batch begins or
        ends, it may be outdated or mix two rows.
        """

    @abstractmethod
    def state(self) -> dict[str, Array]:
        """State with which `restore` continues bit by bit. Raises EnvNotSaved where environments cannot be saved."""

    @abstractmethod
    def restore(self, state: dict[str, Array]) -> None: ...

    def _aim(self, block: Block, columns: slice) -> None:
        self._obs = tuple(a[:, columns] for a in block.observation)
        self._stored_states = tuple(a[:, columns] for a in block.states)
        # Each row of a hidden state is the same memory: a column acts at one row at a time.
        rows = len(block.observation[0])
        hidden = (as_strided(a, (rows, *a.shape), (0, *a.strides)) for a in self.hidden)
        self._states = (*self._stored_states, *hidden)
        self._acted = tuple(a[:, columns] for a in block.action + block.outputs)
        self._info = tuple(a[:, columns] for a in block.info)
        self._reward = block.reward[:, columns]
        self._terminated = block.terminated[:, columns]
        self._truncated = block.truncated[:, columns]
        self._is_init = block.is_init[:, columns]
        self._traj_ids = block.traj_ids[:, columns]
        self._version = block.policy_version[:, columns]

    def _act_at(self, actor: Actor, version: int, columns: slice | Array, at: At, after: At) -> None:
        """Act for columns with what is stored at one index; what follows is written at another."""
        self._acting = columns, at, after
        obs, states = tuple([a[at] for a in self._obs]), tuple([a[at] for a in self._states])
        self._random.illegal = None if self.env.illegal is None else self.env.illegal[columns]
        if actor is self._remote:
            self._asked = self._remote.ask(obs, states, self.is_init[columns])
            return
        began = monotonic_ns()
        acted = actor.act(obs, states, self.is_init[columns])
        if self.laps is not None:
            self.laps.inference_ns += monotonic_ns() - began
        self._send(acted, version)

    def _send(self, acted: Acted, version: int) -> None:
        """Send the actions of the acting columns, and write them while the environments step."""
        columns, at, after = self._acting
        self._check.values(acted.actions)
        self.env.send(acted.actions, columns)
        self._is_under_way = True
        put(self._acted, at, acted.actions + acted.outputs)
        self._traj_ids[at] = self._ids[columns]
        self._version[at] = version if acted.versions is None else acted.versions
        self._is_init[at] = self.is_init[columns]
        self.is_init[columns] = False
        if acted.states:
            put(self._states, after, acted.states)

    def _receive(self) -> Step:
        """Send the server's actions if it was asked, and receive a step, timed if `laps` is set."""
        if (asked := self._asked) is not None:
            self._asked = None
            began = monotonic_ns()
            acted, version = asked.answer()
            if self.laps is not None:
                self.laps.inference_ns += monotonic_ns() - began
            self._send(acted, version)
        self._is_under_way = False
        began = monotonic_ns()
        step = self.env.recv()
        if self.laps is not None:
            self.laps.env_ns += monotonic_ns() - began
        return step

    def _write_step(self, step: Step, at: At, after: At) -> None:
        put(self._obs, after, step.obs)
        if self._info:
            put(self._info, at, step.info)
        self._reward[at] = step.reward
        self._terminated[at] = step.terminated
        self._truncated[at] = step.truncated

    def _begin_trajectories(self, rows: Array | int, columns: Array) -> None:
        self.is_init[columns] = True
        if self._max_frames:
            self._limits[columns] = rows + self._max_frames
        put(self._states, (rows, columns), self._initial_states)


class LockstepEnvGroup(EnvGroup):
    """Steps one VectorEnv and writes its frames. Driven by a Collector: begin, (act, land)*, finish."""

    def start(self, initial_states: Arrays, layout: Layout) -> None:
        super().start(initial_states, layout)
        self.obs: Arrays = tuple(a.copy() for a in self.env.start())
        """[n, ...] per leaf: what to act on next, between batches."""
        self.states: Arrays = ()
        """[n, ...] each recurrent state, between batches."""
        self._reset_states()
        self._row = self._even_rows = 0
        """Row at which all columns act next, and the row from which on not all of them do."""
        self._uneven: Array | None = None
        """[n] instead, the row at which each column acts next."""
        self._is_filling = False
        """The block, and not `obs`, has what comes next."""

    def restart(self) -> None:
        self._settle()
        self.obs = tuple(a.copy() for a in self.env.restart(np.arange(self.env.num_envs)))
        self._trajectories.open(self.columns)
        self._reset_states()

    def _settle(self) -> None:
        """Take the step that a batch left under way which raised in another group's turn."""
        if self._is_under_way:
            with suppress(EnvError):
                self._receive()

    def _reset_states(self) -> None:
        n = self.env.num_envs
        self.states = tuple(np.repeat(value, n, axis=0) for value in self._initial_states)
        self.is_init[:] = True

    def pending(self) -> Arrays:
        if len(columns := self.env.interrupted):
            # They went on without an action after the last batch: their open trajectories end where that did.
            put(self.obs + self.states, columns, self.env.restart(columns) + self._initial_states)
            self._trajectories.lose(columns + self.columns.start)
            self.is_init[columns] = True
        return self.obs + self.states

    def go_on(self, pending: Arrays) -> None:
        self.obs, self.states = pending[: len(self.obs)], pending[len(self.obs) :]

    def begin(self, block: Block, quota: Array) -> None:
        self._block = block
        self._aim(block, self.columns)
        put(self._obs + self._states, 0, self.pending())
        self.quota[:] = quota
        self._row, self._even_rows, self._uneven = 0, int(quota.min()), None
        if self._max_frames:
            left = self._max_frames - self._trajectories.lengths[self.columns]
            self._limits[:] = np.maximum(left, 1)  # a restored one may be longer already: it ends with its next frame
        self._is_filling = True

    @property
    def landed(self) -> Array:
        return np.full(self.env.num_envs, self._row) if self._uneven is None else self._uneven

    @property
    def is_done(self) -> bool:
        # Nearly every step ends here, without a look at the columns.
        return not (self._uneven is None and self._row < self._even_rows) and super().is_done

    def stop(self, columns: Array | slice) -> None:
        super().stop(columns)
        self._even_rows = int(self.quota.min())

    def finish(self) -> None:
        """Copy the start of the next batch out of the block."""
        columns = np.arange(self.env.num_envs)
        self.obs = tuple(a[self.quota, columns] for a in self._obs)
        self.states = tuple(a[self.quota, columns] for a in self._states)
        self._is_filling = False

    def look(self, column: int, leaf: int) -> Array:
        if not self._is_filling:
            return np.array(self.obs[leaf][column])
        return np.array(self._obs[leaf][self._next(column), column])

    def state(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {
            "env": np.frombuffer(self.env.state(), dtype=np.uint8),
            "is_init": self.is_init.copy(),
        }
        arrays |= {f"obs.{i}": value for i, value in enumerate(self.obs)}
        if self.env.illegal is not None and self.env.illegal.any():
            arrays["illegal"] = self.env.illegal.copy()
        return arrays | {f"state.{i}": value for i, value in enumerate(self.states)}

    def restore(self, state: dict[str, Array]) -> None:
        self._settle()
        self.env.restore(state["env"].tobytes())
        if self.env.illegal is not None:
            self.env.illegal[:] = state.get("illegal", False)
        self.is_init[:] = state["is_init"]
        self.obs = tuple(state[f"obs.{i}"].copy() for i in range(len(self.obs)))
        self.states = tuple(state[f"state.{i}"].copy() for i in range(len(self.states)))

    def act(self, actor: Actor, version: int) -> None:
        if self._uneven is None and self._row < self._even_rows:
            self._act_at(actor, version, EVERY_ROW, self._row, self._row + 1)
            return
        columns = np.flatnonzero(self._become_uneven() < self.quota)
        rows = self._next(columns)
        self._act_at(actor, version, columns, (rows, columns), (rows + 1, columns))

    def land(self) -> int:
        step = self._receive()
        sent, at, after = self._acting
        self._write_step(step, at, after)
        ended, num_landed = step.ended, self.env.num_envs
        if self._uneven is None and not len(step.fresh):
            self._row += 1
        else:
            columns = np.arange(self.env.num_envs)[sent]
            ended, landed = columns[step.ended], np.delete(columns, step.fresh)
            self._become_uneven()[landed] += 1
            num_landed = len(landed)
        if len(ended):
            self._end(ended, step.final)
        if len(step.fresh):
            self._replace(columns[step.fresh], tuple(a[step.fresh] for a in step.obs))
        if self._max_frames and len(late := np.flatnonzero(self._limits <= self._next(EVERY_ROW))):
            self._cut(late)
        return num_landed

    def _become_uneven(self) -> Array:
        if self._uneven is None:
            self._uneven = self.landed
        return self._uneven

    def _next(self, columns: Array | slice | int) -> Any:
        """The row or rows [k] at which columns act next."""
        uneven = self._uneven  # another thread may look
        return self._row if uneven is None else uneven[columns]

    def _end(self, columns: Array, final: Arrays) -> None:
        """Trajectories ended with the last frames of these columns; the next rows hold what begins the next ones."""
        rows, of_block = self._next(columns), columns + self.columns.start
        self._block.end(rows - 1, of_block, (*final, *[a[rows, columns] for a in self._stored_states]))
        self._trajectories.open(of_block)
        self._begin_trajectories(rows, columns)

    def _cut(self, columns: Array) -> None:
        """Trajectories reached the manifest's limit: they end truncated and their environments start new episodes."""
        rows = self._next(columns)
        self._truncated[rows - 1, columns] = True
        final = tuple(a[rows, columns] for a in self._obs)
        first = self.env.restart(columns)
        self._end(columns, final)
        put(self._obs, (rows, columns), first)

    def _replace(self, columns: Array, first: Arrays) -> None:
        """Environments were restarted after a crash: their open trajectories end with their last stored frame."""
        rows = self._become_uneven()[columns]
        # A trajectory without a frame in this block has nothing left to mark: its last batch is handed over.
        marked = (rows > 0) & ~self._is_init[rows, columns]
        at, which = rows[marked], columns[marked]
        self._truncated[at - 1, which] = True
        final = tuple(a[at, which] for a in self._obs + self._stored_states)
        self._block.end(at - 1, which + self.columns.start, final)
        self._trajectories.lose(columns + self.columns.start)
        self._begin_trajectories(rows, columns)
        put(self._obs, (rows, columns), first)


class FirstFrames:
    """Draws for as many frames as are left, and asks the policy for the other rows of the last vector step.

    What the policy computes beside the action is zero in drawn rows, and its recurrent states stay at their first
    value: it takes over from there, wherever in an episode that is.
    """

    def __init__(
        self,
        random: RandomActor,
        policy: Actor,
        weights: StagedWeights,
        left: int,
        outputs_of: Callable[[Arrays], Arrays] | None,
    ) -> None:
        """`outputs_of`: what the policy would have computed beside drawn actions; may leave out the last outputs."""
        self.outputs, self.states, self.initial_states = policy.outputs, policy.states, policy.initial_states
        self.device = policy.device
        self.left = left
        self._random = random
        self._policy = policy
        self._weights = weights
        self._outputs_of = outputs_of

    def act(self, obs: Arrays, states: Arrays, is_init: Array) -> Acted:
        n, actions = len(is_init), self._random.act(obs, states, is_init).actions
        known = () if self._outputs_of is None else self._outputs_of(actions)
        fills = [RANDOM_VERSION if leaf.key[0] == "collector" else 0 for leaf in self.outputs]  # versions of groups
        zeros = [np.full((n, *leaf.shape), fill, leaf.dtype) for leaf, fill in zip(self.outputs, fills, strict=True)]
        first = tuple(np.repeat(value, n, axis=0) for value in self.initial_states)
        drawn = actions, (*known, *zeros[len(known) :]), first
        num_drawn, self.left = min(self.left, n), max(0, self.left - n)
        if num_drawn == n:
            return Acted(*drawn)
        # With all rows: some policies know how many environments there are.
        acted = self._policy.act(obs, states, is_init)
        versions = np.full(n, self._weights.version) if acted.versions is None else acted.versions
        versions[:num_drawn] = RANDOM_VERSION

        def join(first: Arrays, others: Arrays) -> Arrays:
            return tuple(np.concatenate([a[:num_drawn], b[num_drawn:]]) for a, b in zip(first, others, strict=True))

        actions, outputs, states = map(join, drawn, (acted.actions, acted.outputs, acted.states))
        return Acted(actions, outputs, states, versions)
