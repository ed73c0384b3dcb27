"""A fleet with the face of TorchRL's collectors: an iterable of batches, and their methods.

# W collectors, B environments of each, T steps
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from math import ceil, inf, isinf
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase

from cormorant_compat.arguments import Policy, plain
from cormorant_compat.torchrl import batches
from cormorant_compat.torchrl.distant import execute_in_worker
from cormorant_compat.torchrl.free_running import FreeRunning
from cormorant_compat.torchrl.plan import CollectionPlan, next_seed, number_of
from cormorant_compat.torchrl.policy import (
    Number,
    Weights,
    WeightUpdater,
    as_policy,
    call_factory,
    on_cpu,
    read_weights,
)
from cormorant_compat.torchrl.settings import Hook, broadcast
from cormorant_contract.job import CollectorJob
from cormorant_postproc import split_trajectories
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.errors import StateError, WeightsError
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.fleet.stats import WorkerReceipts
from cormorant_worker.policy.actor import MAIN_MODEL

if TYPE_CHECKING:
    from cormorant_worker.fleet.fleet import WorkerFleet
    from cormorant_worker.fleet.transport import Engine

_START_S = 300.0
_STOP_S = 10.0

Batch: TypeAlias = TensorDictBase | None


class NoLength(RuntimeError, TypeError):
    """The number of batches is unknown. A TypeError, so that `list(collector)` works without a length."""


class FleetCollector:
    """Collectors in processes on this machine, like TorchRL's. Use as a context manager, or call `shutdown`.

    Iterating gives batches: `[W, B, T]` in sync mode, one collector's `[B, T]` in async mode; without B where each
    collector has one environment, without W where there is one collector; `[trajectories, longest]` with `split_trajs`.
    """

    weight_updater: WeightUpdater | None = None
    """Object that replaces publishing; None: weights are published."""
    _extends_in_workers = False
    """Workers extend the replay buffer themselves."""
    _stacks_one = False
    """Batches of one collector have a dimension W of 1 in sync mode."""

    def __init__(self, plan: CollectionPlan) -> None:
        """Start the collectors and wait until each has its first observation.

        Raises:
            ValueError, TypeError: invalid arguments; before anything starts.
            WorkerFailed: a collector cannot start; says why.
        """
        self._plan, self._settings = plan, (settings := plan.settings)
        self.policy: Policy | None = plan.policy
        """The policy as it was given, whose weights are published where none are named."""
        self._policy = as_policy(plan.policy, is_trusted=bool(settings["trust_policy"]))
        made = self._all_parts()
        self._usual = made[-1]
        """Parts of a collector that joins later."""
        self._devices = [parts.device for parts in made]
        """By collector: of its policy."""
        self.requested_frames_per_batch = settings["frames_per_batch"]
        self.init_random_frames = settings["init_random_frames"]
        self.total_frames: float = settings["total_frames"] or inf
        self.replay_buffer = settings["replay_buffer"]
        self.pre_collect_hook: Hook | None = settings["pre_collect_hook"]
        """Called without arguments before each batch is waited for; may be exchanged, and so may the next two."""
        self.post_collect_hook = settings["post_collect_hook"]
        self.postproc: Hook | None = settings["postproc"]
        self._frames = self._iterations = 0
        """Handed out."""
        self._taken: Loan | None = None
        self._has_begun = False
        self._seeded_at = 0.0
        """By time.monotonic()."""
        self._running: FreeRunning | None = None
        self._pool = None if settings["trajs_per_batch"] is None else batches.EpisodePool(settings)
        self._counts = batches.StepCounts() if settings["max_frames_per_traj"] else None
        job = plan.job()
        (self._group,) = (group.name for group in job.spec.worker_groups)
        self.fleet: WorkerFleet = self._open(job, made)
        """The fleet itself: its state, statistics and events."""
        for leaf in () if self._counts is None else self.fleet.layout.observation:
            # Gymnasium's observations lie below "observation".
            if leaf.key[-1] == "done" and leaf.key[:-1] not in ((), ("observation",)):
                self._close()
                raise ValueError(
                    f"max_frames_per_traj does not reach {'.'.join(leaf.key)}, a flag of a group of "
                    "agents; let the environment cut its trajectories (torchrl.envs.StepCounter)"
                )

    # -- what to run -------------------------------------------------------------------------------------------

    def _open(self, job: CollectorJob, parts: Sequence[WorkerOverrides]) -> "WorkerFleet":
        from cormorant_worker.fleet.fleet import WorkerFleet
        from cormorant_worker.local_fleet import owned

        self._parts = [one.to_bytes() for one in parts]
        options = FleetOptions(
            workers=self._plan.num_collectors,
            overrides=self._parts,
            whole_rows=True,
            # Nothing is collected before it is asked for: a seed, weights or a state that come first rule it.
            starts_paused=True,
            startup_timeout_s=_START_S,
        )
        return owned(WorkerFleet(job, options, engine=self._connect()), self)

    def _connect(self) -> "Engine | None":
        return None  # workers run on this machine

    def _all_parts(self) -> list[WorkerOverrides]:
        plan, is_trusted = self._plan, bool(self._settings["trust_policy"])
        factories = broadcast(self._settings["policy_factory"], "policy_factory", plan.num_collectors)
        store = batches.StoreInBuffer(self._settings) if self._extends_in_workers else None
        return [
            WorkerOverrides(
                envs=plan.makers[i],
                policy=None if factory is not None else on_cpu(self._policy),
                policy_factory=None if factory is None else partial(call_factory, factory, is_trusted),
                settings=plan.overrides[i],
                on_batch=store,
                device=plan.devices[i] or "cpu",
                raises=True,
            )
            for i, factory in enumerate(factories)
        ]

    # -- batches -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over batches until `total_frames`; yields None for each batch that goes into a replay buffer."""
        return self.iterator()

    def iterator(self) -> Iterator[Batch]:
        while (batch := self._collect()) is not None:
            yield batch[0]

    def next(self) -> Batch:
        """One batch; None when all have been handed out, or when the batch went into a replay buffer."""
        batch = self._collect()
        return None if batch is None else batch[0]

    def __len__(self) -> int:
        """Batches in all. Raises NoLength, a RuntimeError: there is no end, or the number is unknown."""
        if isinf(self.total_frames) or self._pool is not None:
            raise NoLength("the collector has no length: total_frames is -1 (no limit), or trajs_per_batch is given")
        return ceil(self.total_frames / self.frames_per_batch)  # both are at least 1

    @property
    def frames_per_batch(self) -> int:
        """Frames of a batch: `requested_frames_per_batch`, rounded up to whole steps of all environments."""
        step: int = self._plan.share * self.fleet.layout.num_envs
        return -(-self.requested_frames_per_batch // step) * step

    def _collect(self) -> tuple[Batch] | None:
        """The next batch, in a tuple; None when nothing is left."""
        frames = 0  # to be counted once postproc has not raised
        if (pool := self._pool) is not None:
            while (episodes := pool.take()) is None:
                if (loan := self._begin()) is None:
                    if (episodes := pool.take(is_last=True)) is None:
                        return None
                    break
                batch = self._frames_of(loan)
                self._frames += loan.num_frames
                pool.add(self._place(batch, loan), _envs_of(batch, loan))
            batch = episodes
        else:
            if (loan := self._begin()) is None:
                return None
            frames = loan.num_frames
            if self._extends_in_workers:
                self._frames += frames
                self._iterations += 1
                return (None,)
            batch = self._frames_of(loan)
            if self._settings["split_trajs"]:
                batch = split_trajectories(batch)
            else:
                batches.mark_padding(batch)
                rows, steps = batch.shape
                workers, envs = len(loan.parts), rows // len(loan.parts)
                is_stacked = self._plan.mode == "sync" and (self._stacks_one or workers > 1)
                shape = [size for size, is_there in ((workers, is_stacked), (envs, envs > 1)) if is_there]
                batch = batch.reshape(*shape, steps)
                batch.names = [None] * len(shape) + ["time"]
            batch = self._place(batch, loan)
        if self.postproc is not None:
            batch = self.postproc(batch)
        self._frames += frames
        self._iterations += 1
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        if self.replay_buffer is None:
            return (batch,)
        batches.extend_buffer(self.replay_buffer, batch)
        return (None,)

    def _begin(self) -> Loan | None:
        if self.pre_collect_hook is not None and self._frames < self.total_frames:
            self.pre_collect_hook()
        if self._taken is not None:
            self._taken.release()
        if not self._has_begun:
            self._has_begun = True
            self.fleet.resume()
        self._taken = self.fleet.borrow()
        while self._taken is not None and 0 < self._taken.parts[0].sealed_at < self._seeded_at:
            # From before the seed, which rules from the first batch after it on.
            self._frames += self._taken.num_frames
            self._taken.release()
            self._taken = self.fleet.borrow()
        return self._taken

    def _frames_of(self, loan: Loan) -> TensorDictBase:
        """`[R, T]`, contiguous in memory of its own as TorchRL's, with root flags and counts of steps."""
        batch: TensorDictBase = loan.tensordict()
        if loan.mode == "async":  # sync batches are copies
            batch = batch.apply(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        loan.copied()
        batches.add_torchrls(batch, self._counts, _envs_of(batch, loan), is_compact=self._settings["compact_obs"])
        return batch

    def _place(self, batch: TensorDictBase, loan: Loan) -> TensorDictBase:
        device = self._plan.storing[min(number_of(loan.parts[0].worker), len(self._plan.storing) - 1)]
        if device != "cpu":
            return batch.to(device)
        return batch.pin_memory() if self._settings["pin_memory"] and torch.cuda.is_available() else batch

    # -- weights -----------------------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | Mapping[int, Weights] | None = None,
        *,
        weights: Weights | None = None,
        policy: Weights | None = None,
        worker_ids: Number | Sequence[Number] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Weights] | None = None,
    ) -> WorkerReceipts:
        """Publish weights; without any, those of the policy that the collector was made with. Each collector uses them
        from its next batch on; in sync mode, all of the next batch does. `weights_dict` is published whole or not at
        all. Returns which collectors use the weights already, and which will.

        Raises:
            ValueError: arguments that exclude each other, or a collector that does not exist; nothing was published.
            WeightsError, WeightsMismatch: they do not fit; nothing was published. Of weights by the numbers of
                collectors, those before that number were.
        """
        given = [one for one in (policy_or_weights, weights, policy, weights_dict) if one is not None]
        if len(given) > 1 or (weights_dict is not None and model_id is not None):
            raise ValueError(
                "weights were given more than once; give one of policy_or_weights, weights, policy, or weights_dict "
                "alone"
            )
        source: Any = given[0] if given else self.policy
        if self.weight_updater is not None:
            if model_id is not None or weights_dict is not None:
                raise ValueError(
                    "model_id and weights_dict go nowhere with a weight_updater: its push_weights takes "
                    "policy_or_weights and worker_ids; give one of policy_or_weights, weights, policy"
                )
            self.weight_updater.push_weights(policy_or_weights=source, worker_ids=worker_ids)
            return self.fleet.receipt(self.fleet.version)
        if worker_ids is None and isinstance(source, dict) and source and all(isinstance(name, int) for name in source):
            self._names_of(list(source))
            for number, one in source.items():
                receipt = self.update_policy_weights_(one, worker_ids=number, model_id=model_id)
            return receipt
        if source is None:
            raise WeightsError("there are no weights to publish: the collector was made without a policy; give some")
        is_whole = weights_dict is not None or (source is self.policy and isinstance(source, Mapping))
        by_model = source if is_whole else {model_id or MAIN_MODEL: source}
        found = {name: read_weights(value, policy=self._policy) for name, value in by_model.items()}
        return self._publish(found, worker_ids)

    def _publish(self, weights: Mapping[str, Mapping[str, torch.Tensor]], worker_ids: Any) -> WorkerReceipts:
        return self.fleet.publish(weights, workers=() if worker_ids is None else self._names_of(worker_ids))

    def _names_of(self, worker_ids: Any) -> tuple[str, ...]:
        several = worker_ids if isinstance(worker_ids, Sequence) and not isinstance(worker_ids, str) else [worker_ids]
        known = range(self._plan.num_collectors)  # also those between two processes, or at their ends
        chosen = [[i for i in known if plain(one) == i or str(one) == self._devices[i]] for one in several]
        if not chosen or not all(chosen):
            raise ValueError(
                f"worker_ids {worker_ids!r} is not a collector, or several: there are {[*known]}, on "
                f"{sorted(set(self._devices))}; nothing was published"
            )
        return tuple(f"{self._group}-{one}" for one in dict.fromkeys(chain(*chosen)))

    # -- seeds, state, the end ---------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Restart every collector's environments and random streams from seeds derived from this one, from the next
        batch on. Batches that asynchronous collectors had ready are dropped, and count as collected. Returns the seed
        that TorchRL would.

        Raises:
            FleetError: the seed is negative, or all frames are collected.
        """
        return self._seed_each(seed, static_seed)[-1]

    def _seed_each(self, seed: int, static_seed: bool) -> list[int]:
        # Paused, so that no batch begins between the seed and the look at the clock.
        was_paused = self.fleet.stats().paused
        self.fleet.pause()
        try:
            self.fleet.seed(seed)
            self._seeded_at = time.monotonic()
        finally:
            if not was_paused:
                self.fleet.resume()
        self._forget_episodes()
        links = 0 if static_seed else self.fleet.layout.num_envs
        count = range(self._plan.num_collectors)
        return list(accumulate(count, lambda last, _: next_seed(last, links), initial=seed))[1:]

    def state_dict(self) -> OrderedDict[str, Any]:
        """State from which to continue after the last batch handed out: `policy_state_dict` (modules only), `frames`,
        `iter`, `fleet`, the collectors as bytes, and with `max_frames_per_traj` `step_counts` of open trajectories.
        Frames of batches that were not taken are collected again. Raises StateError with `trajs_per_batch`.
        """
        if self._pool is not None:
            raise StateError(
                "a collector with trajs_per_batch has no state: frames of episodes that go on are counted already and "
                "would be missing; iterate without trajs_per_batch, or save the policy and start over"
            )
        saved = replace(FleetState.from_bytes(self.fleet.state()), frames=self._frames)
        state: OrderedDict[str, Any] = OrderedDict()
        if isinstance(self.policy, torch.nn.Module):
            state["policy_state_dict"] = self.policy.state_dict()
        state["frames"], state["iter"] = self._frames, self._iterations
        state["fleet"] = torch.frombuffer(bytearray(saved.to_bytes()), dtype=torch.uint8)
        if self._counts is not None:
            state["step_counts"] = dict(self._counts.following)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from a `state_dict()` of a collector with the same arguments. Raises StateError if it does not fit.
        `strict`: of the policy's weights.
        """
        if missing := [name for name in ("frames", "iter", "fleet") if name not in state_dict]:
            raise StateError(f"the state has no {', '.join(missing)}; give what state_dict() gave")
        if self._taken is not None:
            self._taken.release()
            self._taken = None
        self.fleet.restore(state_dict["fleet"].cpu().numpy().tobytes())
        self._frames = int(state_dict["frames"])
        self._iterations = int(state_dict["iter"])
        if self._counts is not None:
            self._counts.following = dict(state_dict.get("step_counts", {}))
        if isinstance(self.policy, torch.nn.Module) and "policy_state_dict" in state_dict:
            self.policy.load_state_dict(state_dict["policy_state_dict"], strict=strict)
        self._forget_episodes()

    def _forget_episodes(self) -> None:
        # What follows continues none of the episodes that were not handed out.
        if self._pool is not None:
            self._pool.clear()

    def stats(
        self, workers: Literal["aggregate", "per_worker", "both"] | None = None, timeout: float = 10.0
    ) -> dict[str, Any]:
        """Counts ("aggregate"), and the state of each collector ("per_worker"). Ignores `timeout`."""
        del timeout  # the fleet knows already, no worker is asked
        if workers not in (None, "aggregate", "per_worker", "both"):
            raise ValueError(f"workers must be one of aggregate, per_worker and both, found {workers!r}")
        fleet = self.fleet.stats()
        sizes = {"workers": self.num_workers, "workers_alive": sum(worker.pid != 0 for worker in fleet.workers)}
        general = {
            "frames": self._frames,
            "worker_frames": fleet.frames,
            "batches": self._iterations,
            "total_frames": -1 if isinf(self.total_frames) else self.total_frames,
            "completed": self._frames >= self.total_frames,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": fleet.version,
            "restarts": fleet.restarts,
        } | ({} if self._pool is None else {"episodes_given_up": self._pool.given_up})
        each = {
            f"worker_{number_of(worker.name)}/{key}": getattr(worker, key)
            for worker in fleet.workers
            for key in ("frames", "version", "phase")
        }
        return sizes | ({} if workers == "per_worker" else general) | ({} if workers == "aggregate" else each)

    @property
    def num_workers(self) -> int:
        return self._plan.num_collectors

    def get_distant_attr(self, attr: str) -> Any:
        """An attribute in each collector's process, between batches, pickled: `"env.batch_size"`, `"policy"`."""
        return self.map_fn("get_distant_attr", [(attr,)] * self.num_workers)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method in each collector's process, between batches: `"env.set_level"`, `"reset"`, `"policy.eval"`,
        with one entry of arguments for each collector. Returns the results in their order; raises what a call raised.
        """
        given = list_of_args or [()] * self.num_workers, list_of_kwargs or [{}] * self.num_workers
        for entries in given:
            if len(entries) != self.num_workers:
                raise ValueError(f"Expected {self.num_workers} argument entries, one a collector, got {len(entries)}")
        found = self.fleet.call(partial(execute_in_worker, method_name, list(zip(*given, strict=True))))
        if method_name == "reset":
            self._forget_episodes()
        results = [found[name] for name in sorted(found, key=number_of)]
        if errors := [result for result in results if isinstance(result, Exception)]:
            raise errors[0]
        return results

    # -- running free, the end ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Fill the replay buffer from a thread of its own, until everything is collected or `shutdown`. Raises
        RuntimeError if there is no replay buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() fills a replay buffer, and there is none; give replay_buffer, or iterate")
        if not self.is_running():
            self._running = FreeRunning(self._collect)

    def is_running(self) -> bool:
        return self._running is not None and self._running.is_running

    @contextmanager
    def pause(self, timeout: float = 30.0) -> Iterator[None]:
        """Within the block, nothing is stepped and the buffer does not change. Has no effect before `start`. Raises
        ControlTimeout if the current batch does not end within `timeout` seconds; the collector keeps running.
        """
        if self._running is None or not self.is_running():
            yield
            return
        with self._running.held(timeout):
            self.fleet.pause()
            try:
                yield
            finally:
                self.fleet.resume()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the thread of `start` and the collectors, within seconds. May be called twice.

        Args:
            timeout: seconds for the thread of `start` to finish its batch, before the fleet is closed.
            close_env: ignored; environments are always closed.
            raise_on_error: raise the error that ended that thread.
        """
        del close_env
        running, self._running = self._running, None
        if running is not None:
            running.stop(timeout or 0.0)
        self._close()
        # A batch under way may end with an error only now.
        error = running.stop(_STOP_S) if running is not None else None
        if error is not None and raise_on_error:
            raise error

    async_shutdown = shutdown

    def _close(self) -> None:
        self.fleet.close()

    def __enter__(self) -> "FleetCollector":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _envs_of(batch: TensorDictBase, loan: Loan) -> list[tuple[str, int]]:
    """By row of a batch `[R, T]`: its collector, and the environment there."""
    rows = batch.shape[0] // len(loan.parts)
    return [(part.worker, row) for part in loan.parts for row in range(rows)]
