"""TorchRL's collector classes, `Collector` in this process and the others over worker processes, and its helpers that
make collectors: `sync_sync_collector`, `sync_async_collector`, `make_collector_onpolicy`, `make_collector_offpolicy`.

`SyncDataCollector`, `MultiSyncDataCollector`, `MultiaSyncDataCollector` and `aSyncDataCollector` are their older names.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, Unpack, cast

import torch

from cormorant_compat.arguments import Devices, Environment, Keywords, Policy, as_count
from cormorant_compat.torchrl.collector import FleetCollector
from cormorant_compat.torchrl.distant import execute, resolve
from cormorant_compat.torchrl.in_process import InProcessFleet
from cormorant_compat.torchrl.plan import Mode, make_plan, share_out
from cormorant_compat.torchrl.settings import CollectorKeywords, MakerKeywords
from cormorant_contract.job import CollectorJob
from cormorant_postproc import MultiStep
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.policy.actor import device_of

_BACKENDS = ("direct", "process", "multiprocessing", "ray")


class Collector(FleetCollector):
    """One collector in this process, like TorchRL's `Collector`. Use as a context manager, or call `shutdown`. With
    `backend` or `num_collectors` it is a MultiSyncCollector, a MultiAsyncCollector or a RayCollector instead.

    Collects with the learner's own module, unless `device` or `policy_device` differs from the module's device: then
    it collects with a copy, and `update_policy_weights_` copies the learner's weights into it.
    """

    fleet: InProcessFleet  # type: ignore[assignment]  # with the methods of a WorkerFleet that are called here

    def __new__(
        cls,
        *args: Any,
        backend: str | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        backend_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        options = dict(backend_options or {})
        backend = backend or ("direct" if num_collectors is None else "process")
        if backend == "direct":
            if num_collectors not in (None, 1) or sync is not None or options:
                raise ValueError(
                    f"num_collectors {num_collectors}, sync {sync}, backend_options {options}: with backend "
                    '"direct" a Collector is one, in this process; give backend "process" or "ray"'
                )
            return super().__new__(cls)
        if backend not in _BACKENDS:
            raise ValueError(f'backend "{backend}" is not known here; use one of {", ".join(_BACKENDS)}')
        given: dict[str, Any] = {**kwargs, **options}
        made: FleetCollector
        if backend == "ray":
            from cormorant_compat.torchrl.ray_collector import RayCollector

            made = RayCollector(*args, num_collectors=num_collectors, sync=bool(sync), **given)
        else:
            kind = MultiSyncCollector if sync else MultiAsyncCollector
            made = kind(*args, num_workers=num_collectors, **given)
        return cast(Self, made)  # what most scripts get; `backend` tells the others

    def __init__(
        self,
        create_env_fn: "Environment | Sequence[Environment]",
        policy: "Policy | None" = None,
        *,
        frames_per_batch: int,
        create_env_kwargs: "Keywords | None" = None,
        backend: str | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        backend_options: Mapping[str, Any] | None = None,
        **kwargs: Unpack[CollectorKeywords],
    ) -> None:
        """Build the environments, and try the policy. A list of environments or makers is one batch of environments.

        Raises:
            ValueError, TypeError: invalid arguments.
            EnvError, PolicyError: environments or the policy cannot be used; says why.
        """
        del backend, num_collectors, sync, backend_options  # `__new__` chose by them
        fns = list(create_env_fn) if isinstance(create_env_fn, list | tuple) else [create_env_fn]
        given = {"frames_per_batch": frames_per_batch, "total_frames": -1, "vectorization": "inline", **kwargs}
        makers = share_out(fns, create_env_kwargs, len(fns), 1)
        super().__init__(make_plan("async", makers, policy, given, seed=_drawn_seed()))

    def _all_parts(self) -> list[WorkerOverrides]:
        (parts,) = super()._all_parts()
        own = str(device_of(self._policy))
        device = self._plan.devices[0] or own
        is_own = torch.device(device) == torch.device(own)
        if parts.policy_factory is not None:
            return [replace(parts, device=device)]
        acting = self._policy if is_own else copy.deepcopy(self._policy)
        return [replace(parts, policy=acting, device=device, shares_policy=is_own)]

    def _open(self, job: CollectorJob, parts: Sequence[WorkerOverrides]) -> Any:
        return InProcessFleet(job, parts[0])

    @property
    def env(self) -> Any:
        """The environment that was given or made; a list if there are several."""
        made = [maker.made for maker in self._plan.makers[0]]
        return made[0] if len(made) == 1 else made

    def get_distant_attr(self, attr: str) -> Any:
        """An attribute of this collector, or of an object it holds: `"env.batch_size"`."""
        return resolve(self, attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of this collector, or of an object it holds, once for each entry of the lists. Raises
        ValueError if one of them is longer.
        """
        count = max(len(list_of_args or ()), len(list_of_kwargs or ()), 1)
        arguments = zip(list_of_args or [()] * count, list_of_kwargs or [{}] * count, strict=True)
        return [execute(self, method_name, *given, **named) for given, named in arguments]

    def reset(self) -> None:
        self.fleet.restart()
        self._forget_episodes()


class _MultiCollector(FleetCollector):
    mode: Mode

    def __init__(
        self,
        create_env_fn: "Environment | Sequence[Environment]",
        policy: "Policy | None" = None,
        *,
        frames_per_batch: int,
        num_workers: int | None = None,
        create_env_kwargs: "Keywords | None" = None,
        **kwargs: Unpack[CollectorKeywords],
    ) -> None:
        """Start the collectors and wait until each has its first observation.

        `frames_per_batch` is of all collectors together (sync), or of each (async).

        Raises:
            ValueError, TypeError: invalid arguments; before anything starts.
            WorkerFailed: a collector cannot start; says why.
        """
        makers = share_out(create_env_fn, create_env_kwargs, 1, num_workers)
        given = {"frames_per_batch": frames_per_batch, "total_frames": -1, **kwargs}
        super().__init__(make_plan(self.mode, makers, policy, given, seed=_drawn_seed()))


class MultiSyncCollector(_MultiCollector):
    """Collectors in processes, like TorchRL's. One batch `[W, ...]` of all; collects only while a batch is awaited."""

    mode = "sync"
    _stacks_one = True


class MultiAsyncCollector(_MultiCollector):
    """Collectors in processes, like TorchRL's. Yields one collector's batch as it completes; others continue."""

    mode = "async"


class AsyncCollector(MultiAsyncCollector):
    """One collector in its own process, which keeps collecting while the learner learns."""


SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector  # noqa: N816  # TorchRL's own name


def sync_sync_collector(
    env_fns: "Environment | Sequence[Environment]",
    env_kwargs: "Keywords | None" = None,
    num_env_per_collector: int | None = None,
    num_collectors: int | None = None,
    policy: "Policy | None" = None,
    **kwargs: Unpack[MakerKeywords],
) -> FleetCollector:
    """Synchronous collectors: one batch from all of them, and nothing is stepped until the next is asked for.

    Raises:
        ValueError, TypeError: invalid arguments; before anything starts.
        WorkerFailed: a collector cannot start.
    """
    makers = share_out(env_fns, env_kwargs, num_env_per_collector, num_collectors)
    return FleetCollector(make_plan("sync", makers, policy, kwargs))


def sync_async_collector(
    env_fns: "Environment | Sequence[Environment]",
    env_kwargs: "Keywords | None" = None,
    num_env_per_collector: int | None = None,
    num_collectors: int | None = None,
    policy: "Policy | None" = None,
    **kwargs: Unpack[MakerKeywords],
) -> FleetCollector:
    """Asynchronous collectors: they keep collecting while the learner learns, and the first complete batch is yielded
    first. Raises as `sync_sync_collector`.
    """
    makers = share_out(env_fns, env_kwargs, num_env_per_collector, num_collectors)
    return FleetCollector(make_plan("async", makers, policy, kwargs))


@dataclass
class OnPolicyCollectorConfig:
    """Configuration of `make_collector_onpolicy`; any object with these attributes works."""

    collector_device: "Devices | None" = field(default_factory=lambda: ["cpu"])
    pin_memory: bool = False
    frames_per_batch: int = 1000
    """Frames per batch, over all environments."""
    total_frames: int = 50_000_000
    """An environment that repeats actions counts each action once."""
    num_workers: int = 32
    """Environments, of ceil(num_workers / env_per_collector) collectors."""
    env_per_collector: int = 8
    seed: int = 42
    exploration_type: str = "random"
    async_collection: bool = False
    """Off-policy only."""
    max_frames_per_traj: int = -1
    gamma: float = 0.99


@dataclass
class OffPolicyCollectorConfig(OnPolicyCollectorConfig):
    multi_step: bool = False
    n_steps_return: int = 3
    init_random_frames: int = 50_000


def make_collector_onpolicy(
    make_env: Callable[..., Any],
    actor_model_explore: "Policy | None",
    cfg: Any,
    make_env_kwargs: "Keywords | None" = None,
) -> FleetCollector:
    """A synchronous collector whose batches are split into trajectories. `cfg` is an OnPolicyCollectorConfig or
    anything with its attributes, and is not changed.

    Raises:
        ValueError: invalid numbers, for example fewer num_workers than env_per_collector.
    """
    return _make_from(cfg, make_env, actor_model_explore, make_env_kwargs, is_off_policy=False)


def make_collector_offpolicy(
    make_env: Callable[..., Any],
    actor_model_explore: "Policy | None",
    cfg: Any,
    make_env_kwargs: "Keywords | None" = None,
) -> FleetCollector:
    """A collector for off-policy learners: asynchronous if `cfg.async_collection`, with multi-step rewards if
    `cfg.multi_step`. Raises as `make_collector_onpolicy`.
    """
    return _make_from(cfg, make_env, actor_model_explore, make_env_kwargs, is_off_policy=True)


def _make_from(cfg: Any, make_env: Any, policy: Any, env_kwargs: Any, *, is_off_policy: bool) -> FleetCollector:
    workers, per = as_count(cfg.num_workers, "num_workers"), as_count(cfg.env_per_collector, "env_per_collector")
    if workers < per:
        raise ValueError(f"num_workers {workers} and env_per_collector {per}: a collector has more than there are")
    seed = as_count(cfg.seed, "seed", least=0)
    kwargs: dict[str, Any] = {
        "max_frames_per_traj": getattr(cfg, "max_frames_per_traj", -1),
        "frames_per_batch": cfg.frames_per_batch,
        "total_frames": cfg.total_frames,
        "device": cfg.collector_device,
        "storing_device": cfg.collector_device,
        "split_trajs": True,
        "exploration_type": cfg.exploration_type,
        "pin_memory": getattr(cfg, "pin_memory", False),
    }
    mode: Mode = "sync"
    if is_off_policy:
        mode = "async" if cfg.async_collection else "sync"
        kwargs["init_random_frames"] = cfg.init_random_frames
        if cfg.multi_step:
            kwargs["postproc"] = MultiStep(gamma=getattr(cfg, "gamma", 0.99), n_steps=cfg.n_steps_return)
    makers = share_out(make_env, env_kwargs, 1, -(-workers // per))
    return FleetCollector(make_plan(mode, makers, policy, kwargs, seed=seed))


def _drawn_seed() -> int:
    # From torch's generator, so that `torch.manual_seed` fixes it and two collectors differ.
    return int(torch.randint((1 << 31) - 1, (1,)))
