"""TorchRL's RayCollector over the Ray fleet: collectors as actors, replaced when they die, ahead of the learner."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import torch

from cormorant_compat.arguments import Environment, Keywords, Policy, as_count, as_flag
from cormorant_compat.torchrl import settings
from cormorant_compat.torchrl.collector import FleetCollector
from cormorant_compat.torchrl.distant import execute
from cormorant_compat.torchrl.plan import make_plan, number_of, share_out
from cormorant_compat.torchrl.policy import Weights, WeightUpdater, as_policy, on_cpu
from cormorant_worker.errors import StateError
from cormorant_worker.fleet.batch_queue import Loan
from cormorant_worker.fleet.stats import WorkerReceipts

if TYPE_CHECKING:
    from cormorant_worker.fleet.ray.engine import RayEngine


class NotSet(AttributeError, RuntimeError):
    """Not set: a RuntimeError, as TorchRL documents, and absent for `getattr` with a default."""


class RayCollector(FleetCollector):
    """Collectors as actors of a Ray cluster. Use as a context manager, or call `shutdown`.

        collector = RayCollector([make_env], policy, frames_per_batch=200, total_frames=10_000)
        for batch in collector:
            ...

    With `sync` a batch holds every collector's share, `[W, B, T]`. Otherwise a batch is one collector's, `[B, T]`, in
    order of completion, and collectors continue while the learner uses it.

    Of TorchRL's arguments, these differ:

        collector_class: all of TorchRL's classes have the same effect.
        ray_init_config: an existing connection is kept; otherwise `address`, then the variable RAY_ADDRESS name the
            cluster; without them one is started on this machine, and stopped with the collector.
        replay_buffer: TorchRL's RayReplayBuffer is extended by the collectors themselves, unless trajs_per_batch or
            post_collect_hook need batches here; others where this object is.
        weight_updater: an object whose `push_weights(policy_or_weights=, worker_ids=)` replaces publishing, or a
            factory of one. Its `register_collector(collector)` is called if it has one.
        weight_sync_schemes: ignored; all weights are published in one way, with versions and receipts.

    Raises:
        ValueError, TypeError: invalid arguments; before anything starts.
        FleetError: the cluster cannot be reached or started.
        WorkerFailed, ControlTimeout: a collector cannot start, or was not placed in time.
    """

    def __init__(
        self,
        create_env_fn: "Environment | Sequence[Environment]",
        policy: "Policy | None" = None,
        *,
        frames_per_batch: int,
        create_env_kwargs: "Keywords | None" = None,
        collector_class: type | str | None = None,
        collector_kwargs: "Keywords | None" = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: "Keywords | None" = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        weight_updater: "WeightUpdater | Callable[[], WeightUpdater] | None" = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Any] | None = None,
        **kwargs: Unpack[settings.CollectorKeywords],
    ) -> None:
        del weight_sync_schemes
        sync, updates = as_flag(sync, "sync"), as_flag(update_after_each_batch, "update_after_each_batch")
        num_envs = as_count(num_workers_per_collector, "num_workers_per_collector")
        makers = tuple(own * num_envs for own in share_out(create_env_fn, create_env_kwargs, 1, num_collectors))
        count = len(makers)
        settings.check_class(collector_class)
        given: dict[str, Any] = {"frames_per_batch": frames_per_batch, **kwargs}
        given, overrides = settings.own_settings(collector_kwargs, num_collectors=count, given=given)
        self._remote = settings.remote_options(remote_configs, count)
        self._ray_options = settings.ray_options(ray_init_config, self._remote)
        self._has_other_devices = bool(self._ray_options.address) or settings.is_connected()
        """Collectors may act on other machines."""
        self._updates_each = updates
        self._update_interval = as_count(max_weight_update_interval, "max_weight_update_interval", least=-1)
        self._batches_since: Counter[str] = Counter()
        """By collector: batches since it was given weights."""
        self._last: tuple[str, ...] = ()
        """Collectors of the last batch."""
        needs_batches = given.get("trajs_per_batch") is not None or given.get("post_collect_hook") is not None
        self._extends_in_workers = type(given.get("replay_buffer")).__name__ == "RayReplayBuffer" and not needs_batches
        self.weight_updater = settings.read_updater(weight_updater)
        self._receiver_schemes: dict[str, Any] = {}
        self._worker_idx: int | None = None
        plan = make_plan(
            "sync" if sync else "async",
            makers,
            policy,
            given,
            overrides=overrides,
            is_remote=self._has_other_devices,
            stores_here=not self._extends_in_workers,
        )
        super().__init__(plan)
        try:
            if hasattr(self.weight_updater, "register_collector"):
                self.weight_updater.register_collector(self)
            if weight_recv_schemes:
                self.register_scheme_receiver(weight_recv_schemes)
        except BaseException:
            self.shutdown()
            raise

    # -- what to run -------------------------------------------------------------------------------------------

    def _connect(self) -> "RayEngine":
        # Only Ray collectors need Ray.
        from cormorant_worker.fleet.ray.engine import RayEngine

        self._engine = RayEngine(self._ray_options)
        return self._engine

    @property
    def remote_collectors(self) -> list[Any]:
        """Ray's handles of the running actors, in the collectors' order."""
        return list(self._engine.actors)

    @property
    def num_collectors(self) -> int:
        return self._plan.num_collectors

    @property
    def worker_idx(self) -> int | None:
        """Index of this worker in a larger setup. Raises NotSet, a RuntimeError, if none was assigned."""
        if self._worker_idx is None:
            raise NotSet("worker_idx has not been set: this collector is not part of another one")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, index: int | None) -> None:
        self._worker_idx = index

    def add_collectors(
        self,
        create_env_fn: "Environment | Sequence[Environment]",
        num_envs: int | None = None,
        policy: "Policy | None" = None,
        collector_kwargs: "Keywords | None" = None,
        remote_configs: "Keywords | None" = None,
    ) -> None:
        """Add collectors, and wait for their first observations. They begin with the newest weights,
        under trajectory ids of their own; in sync mode batches grow by their share. `num_envs` must equal that of the
        others, and `collector_kwargs` has devices, limits and exploration alone. Adds all of them, or none.

        Raises:
            ValueError, TypeError: invalid arguments.
            WorkerFailed, ControlTimeout: they cannot start.
        """
        have = len(self._plan.makers[0])
        makers = tuple(own * have for own in share_out(create_env_fn, None, None, None))
        count = len(makers)
        if num_envs is not None and num_envs != have:
            raise ValueError(f"num_envs {num_envs}: the collectors of a fleet have as many environments each, {have}")
        taken, overrides = settings.own_settings(collector_kwargs, num_collectors=count, given={})
        if common := sorted(set(taken) - {"device", "policy_device", "env_device"}):
            raise TypeError(f"collector_kwargs have {common[0]}, which all collectors have in common; leave it out")
        remote = settings.remote_options(remote_configs, count)
        usual, before = self._usual, self.num_collectors
        is_usual = policy is None
        plan = make_plan("async", makers, policy, taken, is_remote=self._has_other_devices, stores_here=False)
        acting = self._policy if is_usual else as_policy(policy)
        added = [
            replace(
                usual,
                envs=makers[i],
                policy=None if usual.policy_factory is not None and is_usual else on_cpu(acting),
                policy_factory=usual.policy_factory if is_usual else None,
                settings=overrides[i],
                device=plan.devices[i] or usual.device,
            )
            for i in range(count)
        ]
        data = [parts.to_bytes() for parts in added]
        earlier = self._plan
        self._remote += [{}] * (before - len(self._remote)) + remote
        self._parts += data
        self._devices += [parts.device for parts in added]
        self._plan = replace(earlier, makers=(*earlier.makers, *makers))
        try:
            self.fleet.resize(self.num_collectors)
        except BaseException:
            self.fleet.resize(before, wait=False)
            self._plan = earlier
            del self._remote[before:], self._parts[before:], self._devices[before:]
            raise

    # -- batches -----------------------------------------------------------------------------------------------

    def _begin(self) -> Loan | None:
        # Not one whose addition failed, and whose batch came before it went.
        last, self._last = [name for name in self._last if number_of(name) < self.num_collectors], ()
        due = set(last) if self._updates_each else set()
        if self._update_interval >= 0:
            due |= {name for name in last if self._batches_since[name] >= max(1, self._update_interval)}
        if due:
            everybody = self._plan.mode == "sync"
            self.update_policy_weights_(worker_ids=None if everybody else [number_of(name) for name in sorted(due)])
            for name in last if everybody else due:  # a weight updater publishes nothing that would say so
                self._batches_since[name] = 0
        loan = super()._begin()
        if loan is not None:
            self._last = tuple(part.worker for part in loan.parts)
            self._batches_since.update(self._last)
        return loan

    # -- weights -----------------------------------------------------------------------------------------------

    def _publish(self, weights: Mapping[str, Mapping[str, torch.Tensor]], worker_ids: Any) -> WorkerReceipts:
        receipt = super()._publish(weights, worker_ids)
        for name in (*receipt.applied, *receipt.waiting):
            self._batches_since[name] = 0
        return receipt

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call the weight updater's `init`; does nothing without one."""
        updater: Any = self.weight_updater
        if updater is not None:
            updater.init(*args, **kwargs)

    def register_scheme_receiver(
        self, weight_recv_schemes: Mapping[str, Any], *, synchronize_weights: bool = True
    ) -> None:
        """Register objects that receive weights from a parent, by model name: their `receive()` returns weights of that
        model. Their `init_on_receiver(model_id=, context=)` is called if they have one: TorchRL's schemes read `policy`
        and `worker_idx` of this object. With `synchronize_weights`, `connect()` of those that have it is called, and
        the weights that arrive are published.
        """
        for model_id, scheme in weight_recv_schemes.items():
            if not callable(getattr(scheme, "receive", None)):
                raise TypeError(f'the scheme of "{model_id}" is a {type(scheme).__name__}, which has no receive()')
        for model_id, scheme in weight_recv_schemes.items():
            if hasattr(scheme, "init_on_receiver") and not getattr(scheme, "initialized_on_receiver", False):
                scheme.init_on_receiver(model_id=model_id, context=self)
            self._receiver_schemes[model_id] = scheme
        if not synchronize_weights:
            return
        version = self.fleet.version
        are_written = False
        for scheme in weight_recv_schemes.values():
            if hasattr(scheme, "connect") and not getattr(scheme, "synchronized_on_receiver", False):
                scheme.connect()
                # TorchRL's have written the first weights into the collector's policy by then.
                are_written |= hasattr(scheme, "synchronized_on_receiver")
        if not are_written:
            self.receive_weights()
        elif self.fleet.version == version:
            self.update_policy_weights_()

    def receive_weights(
        self, policy_or_weights: Weights | None = None, *, weights: Weights | None = None, policy: Weights | None = None
    ) -> None:
        """Take weights and publish them to the collectors: those given, those that registered schemes receive, or those
        of the policy that the collector was made with. Raises ValueError if weights are given and schemes registered.
        """
        is_given = any(one is not None for one in (policy_or_weights, weights, policy))
        if is_given and self._receiver_schemes:
            raise ValueError(
                f"weights were given, and those of {', '.join(self._receiver_schemes)} come from registered schemes; "
                "call receive_weights() without arguments"
            )
        if not self._receiver_schemes:
            self.update_policy_weights_(policy_or_weights, weights=weights, policy=policy)
            return
        weights_dict: dict[str, Any] = {}
        for model_id, scheme in self._receiver_schemes.items():
            version = self.fleet.version
            received = scheme.receive()
            # TorchRL's call `update_policy_weights_` themselves.
            if received is not None and self.fleet.version == version:
                weights_dict[model_id] = received
        if weights_dict:
            self.update_policy_weights_(weights_dict=weights_dict)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of something that belongs to this collector, or read an attribute: `"fleet.stats"`,
        `"_receiver_schemes['policy'].receive"`. Raises AttributeError where the path names nothing.
        """
        return execute(self, attr_path, *args, **kwargs)

    # -- seeds, state ------------------------------------------------------------------------------------------

    def set_seed(  # type: ignore[override]  # a list, as TorchRL's own RayCollector gives it
        self, seed: int, static_seed: bool = False
    ) -> list[int]:
        """Reseed as in the other collectors. Returns a seed for each collector, as TorchRL does."""
        return self._seed_each(seed, static_seed)

    def state_dict(self) -> list[OrderedDict[str, Any]]:  # type: ignore[override]  # likewise
        """The state as in the other collectors, in a list with one equal entry per collector."""
        return [super().state_dict()] * self.num_collectors

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], strict: bool = True) -> None:
        """Continue from a result of `state_dict()`; its first entry stands for all, as in TorchRL."""
        entries = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        if len(entries) not in (1, self.num_collectors):
            raise StateError(
                f"the state has {len(entries)} entries for {self.num_collectors} collectors; give what state_dict() "
                "gave"
            )
        super().load_state_dict(entries[0], strict)

    # -- running free, the end ---------------------------------------------------------------------------------

    def shutdown(  # type: ignore[override]  # positions as TorchRL's own RayCollector has them
        self,
        timeout: float | None = None,
        shutdown_ray: bool = False,
        *,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Shut down as the other collectors do. `shutdown_ray`: also disconnect from Ray, which ends everything that
        this process runs there. A cluster that the collector started is always stopped.
        """
        try:
            super().shutdown(timeout, close_env=close_env, raise_on_error=raise_on_error)
        finally:
            if shutdown_ray:
                from cormorant_worker.fleet.ray.cluster import disconnect

                disconnect()

    def _close(self) -> None:
        for scheme in self._receiver_schemes.values():
            if hasattr(scheme, "shutdown"):
                scheme.shutdown()
        super()._close()

    async def async_shutdown(  # type: ignore[override]  # a coroutine, as TorchRL's own RayCollector has it
        self, shutdown_ray: bool = False, *, timeout: float | None = None
    ) -> None:
        """Run `shutdown` without blocking the event loop."""
        await asyncio.to_thread(self.shutdown, timeout, shutdown_ray=shutdown_ray)
