"""Rollouts: whole batches that are played without the host between two steps, where environments and policy allow it.

    DeviceRollout   the policy reads row t of the batch on its device, and what the environments return there is copied
                    into row t + 1; one copy to the block a batch
    ScanRollout     K steps at a time in one compiled loop, with random actions or a policy in JAX

What depends on which rows ended (trajectory ids, first frames, final observations) is written when the batch is
complete: nothing waits for the device before that. On a CUDA device a policy's rows are recorded (`RowGraphs`).

# T rows, N environments, K steps, k ended
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cormorant_worker.collect.block import Block
from cormorant_worker.collect.env_group import EnvGroup
from cormorant_worker.collect.timing import Timing
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.policy.action_check import ActionCheck
from cormorant_worker.policy.actor import Actor, PolicyActor, samples
from cormorant_worker.policy.jax_policy import JaxPolicy
from cormorant_worker.policy.random_actor import RandomActor
from cormorant_worker.spaces import Array, Arrays, put

log = structlog.get_logger()

Act = Callable[[], None]
"""Computes a row of the batch, the same for this row each time."""
Proceed = Callable[[int], bool]
"""Called after each step with the number of frames that landed; False: the batch ends with them."""


class Ends(NamedTuple):
    """Where episodes ended in a batch, in the order of steps."""

    rows: Array
    """[k]."""
    columns: Array
    """[k]."""
    final: Arrays
    """[k, ...] per leaf: their final observations."""


class Rollout(ABC):
    """Plays batches of one EnvGroup, all columns of the block. Used by the collector's thread."""

    def __init__(self, env: VectorEnv, group: EnvGroup, actor: Actor, check: ActionCheck) -> None:
        self._env, self._group, self._actor, self._check = env, group, actor, check

    def fill(self, block: Block, num_rows: int, version: int, timing: Timing, proceed: Proceed) -> bool:
        """Play `num_rows` steps of every environment into a block, or fewer; False: not now, and nothing was done."""
        if (pending := self._group.pending()) is None:
            return False
        put(block.observation + block.states, 0, pending)
        rows, ends = self._play(block, num_rows, timing, proceed)
        if not self._check.holds(tuple(leaf[:rows].reshape(-1, *leaf.shape[2:]) for leaf in block.action)):
            for row in range(rows):
                self._check.values(tuple(leaf[row] for leaf in block.action), "the batch is dropped")
        observed = tuple(a[: rows + 1] for a in block.observation)
        self._env.check_steps(observed, block.reward[:rows], (ends.rows, ends.columns), ends.final)
        block.policy_version[:rows] = version
        self._group.take_rollout(block, rows, ends.rows, ends.columns, ends.final)
        return True

    def rows_of(self, block: Block, device: torch.device | str | None) -> "DeviceRows | None":
        """The rows of the block that was filled last; None: they are not on this device."""
        return None

    @abstractmethod
    def _play(self, block: Block, num_rows: int, timing: Timing, proceed: Proceed) -> tuple[int, Ends]:
        """Write observations, actions, outputs, states, rewards and flags. Returns the number of rows, and the ends."""


class ScanRollout(Rollout):
    """Environments that can `scan`, with random actions or a policy in JAX."""

    def __init__(self, env: VectorEnv, group: EnvGroup, actor: Actor, check: ActionCheck) -> None:
        """Compile it: the environments begin their first episodes afterwards."""
        super().__init__(env, group, actor, check)
        acting = actor.models.acting if isinstance(actor, PolicyActor) else None
        self._policy = acting if isinstance(acting, JaxPolicy) else None
        obs = samples(env.observation_space, env.num_envs)
        (leaf,) = check.leaves
        no_actions = np.zeros((1, env.num_envs, *leaf.shape), leaf.dtype)
        env.scan(obs, 1, no_actions if self._policy is None else np.zeros((1, 2), np.uint32), self._policy)

    def _play(self, block: Block, num_rows: int, timing: Timing, proceed: Proceed) -> tuple[int, Ends]:
        env, all_ends, t = self._env, list[Ends](), 0
        while t < num_rows:
            rows = slice(t, min(t + env.scan_length, num_rows))
            num_steps, obs = rows.stop - t, tuple(a[t] for a in block.observation)
            laps, began = timing.next_laps(), monotonic_ns()
            # Actions and outputs [K, N, ...] per leaf.
            if self._policy is not None and isinstance(self._actor, PolicyActor):
                keys = self._policy.draw_keys(num_steps)
                chosen, steps = env.scan(obs, num_steps, keys, self._policy)
                chosen = self._actor.stacked(chosen)
            else:
                assert isinstance(self._actor, RandomActor)
                chosen = self._actor.act_steps(env.num_envs, num_steps)
                _, steps = env.scan(obs, num_steps, chosen[0])
            if laps is not None:
                laps.env_ns = monotonic_ns() - began
            put(block.observation, slice(t + 1, rows.stop + 1), tuple(steps.obs))
            put(block.action + block.outputs + block.info, rows, (*chosen, *steps.info))
            block.reward[rows], block.terminated[rows] = steps.reward, steps.terminated
            block.truncated[rows] = steps.truncated
            at, columns = np.nonzero(steps.terminated | steps.truncated)
            all_ends.append(Ends(at + t, columns, tuple(leaf[at, columns] for leaf in steps.seen)))
            if laps is not None:
                timing.measured(laps, steps=num_steps)
            t = rows.stop
            if not proceed(num_steps * env.num_envs):
                break
        parts = zip(*((ends.rows, ends.columns, *ends.final) for ends in all_ends), strict=True)
        ended, columns, *final = map(np.concatenate, parts)
        return t, Ends(ended, columns, tuple(final))


class DeviceRollout(Rollout):
    """A policy and environments on the same device."""

    _actor: PolicyActor

    def __init__(self, env: VectorEnv, group: EnvGroup, actor: PolicyActor, check: ActionCheck) -> None:
        super().__init__(env, group, actor, check)
        assert env.device is not None
        self._device = env.device
        self._initial = [torch.from_numpy(state).to(env.device) for state in actor.initial_states]
        self._rows: DeviceRows | None = None
        self.record = cuda_recorder(actor) if actor.is_recorded and env.device.type == "cuda" else None
        """Records what is done in a row; None: nothing is recorded."""

    def rows_of(self, block: Block, device: torch.device | str | None) -> "DeviceRows | None":
        is_there = device is not None and _is_same(torch.device(device), self._device)
        return self._rows if is_there and self._rows is not None and self._rows.block is block else None

    def _play(self, block: Block, num_rows: int, timing: Timing, proceed: Proceed) -> tuple[int, Ends]:
        env, rows = self._env, self._rows
        if rows is None or not rows.fits(block):
            graphs = None if self.record is None else RowGraphs(self._actor, self.record)
            rows = self._rows = DeviceRows(block, self._device, graphs)
        rows.begin(block, self._group.is_init)
        for t in range(num_rows):
            laps, began = timing.next_laps(), monotonic_ns()
            if rows.graphs is None:
                self._act(rows, t)
            else:
                rows.graphs.run(t, partial(self._act, rows, t))
            acted = monotonic_ns()
            # Copies: the environment may keep or change its actions.
            step = env.step_tensors([stored.clone() for stored in rows.action_at[t]])
            stepped = monotonic_ns()
            if self._actor.reads_first:
                torch.logical_or(step.terminated, step.truncated, out=rows.first_at[t + 1])
            reward, *flags = rows.result_at[t]
            # One launch where all are of one dtype.
            torch._foreach_copy_([*rows.obs_at[t + 1], *rows.seen_at[t], reward], [*step.obs, *step.seen, step.reward])
            torch._foreach_copy_(flags, [step.terminated, step.truncated])
            for stored, value in zip(rows.info_at[t], step.info, strict=True):
                stored.copy_(value)
            if laps is not None:
                laps.inference_ns, laps.env_ns = acted - began, stepped - acted
                timing.measured(laps)
            if not proceed(env.num_envs):
                break
        rows.download(t + 1)
        ended, columns = np.nonzero(block.terminated[: t + 1] | block.truncated[: t + 1])
        return t + 1, Ends(ended, columns, rows.final(ended, columns))

    def _act(self, rows: "DeviceRows", t: int) -> None:
        """Choose actions, and write them with the other outputs and the next states."""
        first = rows.first_at[t]
        # Where an episode began; the stored rows keep what the one before it ended with.
        states = [
            torch.where(first.reshape(-1, *[1] * (state.dim() - 1)), new, state)
            for state, new in zip(rows.states_at[t], self._initial, strict=True)
        ]
        acted = self._actor.act_tensors(rows.obs_at[t], states, first)
        for stored, value in zip((*rows.action_at[t], *rows.outputs_at[t], *rows.states_at[t + 1]), acted, strict=True):
            stored.copy_(value)


def rollout_of(env: VectorEnv, group: EnvGroup, actor: Actor, check: ActionCheck) -> Rollout | None:
    """How whole batches of a collector's only environments are played; None: step by step."""
    is_random = isinstance(actor, RandomActor) and not actor.reads_masks
    if not is_random and not (isinstance(actor, PolicyActor) and actor.can_act_tensors):
        return None
    is_jax = isinstance(actor, PolicyActor) and isinstance(actor.models.acting, JaxPolicy) and not actor.normalizer
    if env.scan_length and (is_random or is_jax):
        return ScanRollout(env, group, actor, check)
    if isinstance(actor, PolicyActor) and env.device is not None and _is_same(actor.device, env.device):
        return DeviceRollout(env, group, actor, check)
    return None


def _is_same(one: torch.device, other: torch.device) -> bool:
    return (one.type, one.index or 0) == (other.type, other.index or 0)


class DeviceRows:
    """The rows of a batch on a device: [T + 1, N, ...] per leaf of what is carried, [T, N, ...] of the rest."""

    def __init__(self, block: Block, device: torch.device, graphs: "RowGraphs | None") -> None:
        """Rows for blocks with as many rows as this one, or fewer."""
        self.device, self.graphs, self.block = device, graphs, block
        self._series = [[torch.empty_like(host, device=device) for host in hosts] for hosts in _series_of(block)]
        self.observation, self.states, self.action, self.outputs, self.info, result = self._series
        # Looked up where episodes ended.
        self._seen = [torch.empty_like(rows[1:]) for rows in self.observation]
        # By row, so that a step does not cut them.
        num_rows = len(block.reward)
        self.obs_at, self.seen_at = _by_row(self.observation, num_rows + 1), _by_row(self._seen, num_rows)
        self.states_at, self.info_at = _by_row(self.states, num_rows + 1), _by_row(self.info, num_rows)
        self.action_at, self.outputs_at = _by_row(self.action, num_rows), _by_row(self.outputs, num_rows)
        self.result_at = _by_row(result, num_rows)
        """Reward, terminated, truncated."""
        self.first_at = torch.zeros((num_rows + 1, block.layout.num_envs), dtype=torch.bool, device=device).unbind()
        """Where episodes begin, for policies that read it."""

    def fits(self, block: Block) -> bool:
        return len(block.reward) < len(self.first_at)

    def begin(self, block: Block, is_init: Array) -> None:
        """Take the first observations and states from a block."""
        self.block = block
        self.first_at[0].copy_(torch.from_numpy(is_init))
        for tensors, hosts in zip((self.observation, self.states), _series_of(block), strict=False):
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor[0].copy_(host[0])

    def download(self, num_rows: int) -> None:
        """Copy what was written into the block, and wait for it."""
        for i, (tensors, hosts) in enumerate(zip(self._series, _series_of(self.block), strict=True)):
            used = slice(num_rows + (i < _NUM_CARRIED))
            for tensor, host in zip(tensors, hosts, strict=True):
                host[used].copy_(tensor[used])

    def final(self, rows: Array, columns: Array) -> Arrays:
        """[k, ...] per leaf: what was seen there."""
        at = torch.from_numpy(rows), torch.from_numpy(columns)
        return tuple(seen[at].cpu().numpy() for seen in self._seen)


_NUM_CARRIED = 2
"""Observations and states have a row more than the others."""


def _series_of(block: Block) -> list[list[torch.Tensor]]:
    result = block.reward, block.terminated, block.truncated
    series = block.observation, block.states, block.action, block.outputs, block.info, result
    return [[torch.from_numpy(array) for array in arrays] for arrays in series]


def _by_row(tensors: Sequence[torch.Tensor], num_rows: int) -> list[tuple[torch.Tensor, ...]]:
    """The rows, one after the other: a tensor [N, ...] per leaf each."""
    return list(zip(*(tensor.unbind(0) for tensor in tensors), strict=True)) or [()] * num_rows


def cuda_recorder(actor: PolicyActor) -> Callable[[Act], Act]:
    """Records on the policy's device. Each replay draws new numbers, from the policy's generators and torch's own."""
    pool = torch.cuda.graph_pool_handle()
    of_policy = (value for value in _attributes(actor) if isinstance(value, torch.Generator))
    generators = [generator for generator in of_policy if generator.device.type == "cuda"]

    def record(act: Act) -> Act:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # Other threads of the process may synchronize meanwhile.
        with torch.cuda.device(actor.device), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            act()
        return graph.replay

    return record


class RowGraphs:
    """CUDA graphs of what a policy's rollout does in a row of the batch: one launch instead of one per kernel.

        1st batch   every row is computed as it is written, and watched: what needs the host cannot be recorded
        2nd batch   every row is recorded, and replayed
        later       replayed

    A graph is a list of kernels with the addresses that they read and write. So a row reads and writes the same memory
    in every batch, and weights and statistics are replaced in place. Used by the collector's thread.
    """

    def __init__(self, actor: PolicyActor, record: Callable[[Act], Act]) -> None:
        self._actor, self._record = actor, record
        self._replays: dict[int, Act | None] = {}
        """By row; None: watched, and not recorded yet."""
        # What a plain function keeps cannot be seen.
        self.refused = "" if actor.models.modules else "the policy is not a torch module"
        """Why nothing is recorded."""

    @property
    def num_recorded(self) -> int:
        return sum(replay is not None for replay in self._replays.values())

    def run(self, row: int, act: Act) -> None:
        """Do what `act` does, which is the same for this row each time."""
        if self.refused:
            return act()
        if replay := self._replays.get(row):
            return replay()
        if row not in self._replays:
            self._replays[row] = None
            before = self._on_host()
            with _Watch() as watch:
                act()
            changed = "keeps or draws numbers on the host" if self._on_host() != before else ""
            return self._refuse(watch.found or changed)
        try:
            self._replays[row] = replay = self._record(act)
        except RuntimeError as error:
            self._refuse(f"raised {type(error).__name__} as it was recorded: {error}")
            return act()
        return replay()

    def _refuse(self, reason: str) -> None:
        if reason:
            self.refused = f"the policy {reason}"
            log.warning("policy_not_recorded", reason=self.refused, remedy="see compile in the guide to own policies")

    def _on_host(self) -> list[Any]:
        """State that a replay would not change again: random states of the host, and plain attributes of the policy."""
        plain = [value for value in _attributes(self._actor) if isinstance(value, bool | int | float | str)]
        drawn = [random.getstate(), np.random.get_state(legacy=False)["state"]]
        if self._actor.device.type != "cpu":
            drawn.append(torch.get_rng_state().tolist())
        return [plain, *map(str, drawn)]


def _attributes(actor: PolicyActor) -> list[Any]:
    modules = [part for module in actor.models.modules.values() for part in module.modules()]
    return [value for part in modules for value in vars(part).values()]


class _Watch(TorchDispatchMode):
    """Finds what waits for the device: a number that Python reads, a shape that depends on values, a copy elsewhere."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        is_read = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if is_read or len(devices) > 1:
            self.found = self.found or f"waits for its device in {func}"
        return result
