"""TorchRL's collector classes: `Collector` in this process, the others over worker processes.

    Collector                    one collector in this process; the policy that acts is the learner's own
    MultiSyncCollector           a process each, one batch of all of them
    MultiAsyncCollector          a process each, batches as they come
    AsyncCollector               one process

`SyncDataCollector`, `MultiSyncDataCollector`, `MultiaSyncDataCollector` and `aSyncDataCollector` are their older names.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase

from cormorant_compat.torchrl.batches import StepCounts
from cormorant_compat.torchrl.collector import FleetCollector
from cormorant_compat.torchrl.devices import devices_of
from cormorant_compat.torchrl.in_process import InProcessFleet
from cormorant_compat.torchrl.makers import is_env, share_out
from cormorant_compat.torchrl.plan import CollectionPlan, Mode
from cormorant_compat.torchrl.settings import read_settings
from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.policy.actor import device_of

_SCHEMES = ("MultiProcessWeightSyncScheme", "NoWeightSyncScheme", "SharedMemWeightSyncScheme")
_SEEDS = (1 << 31) - 1


class Collector(FleetCollector):
    """One collector in this process, as TorchRL's `Collector`. Use as a context manager, or call `shutdown`.

    The policy that acts is the learner's own, unless `device` or `policy_device` is another one than its own: then a
    copy acts, and `update_policy_weights_` gives it the learner's weights.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        create_env_kwargs: Any = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        backend: str | None = None,
        backend_options: Any = None,
        **kwargs: Any,
    ) -> None:
        """Build the environments, and try the policy.

        Args:
            create_env_fn: an environment, or a callable that makes one; a list makes a batch of environments.
            policy: a TensorDictModule, a module, a callable; None: random actions.
            frames_per_batch: frames of a batch, rounded up to whole steps.
            create_env_kwargs: keyword arguments of `create_env_fn`, for all or for each.
            num_collectors: 1; for more there are `MultiSyncCollector` and `MultiAsyncCollector`.
            sync: means nothing to one collector.
            backend: "direct".
            backend_options: none.
            **kwargs: see `CollectorSettings`.

        Raises:
            ValueError, TypeError: arguments that cannot be.
            EnvError, PolicyError: environments or the policy cannot be used; says why.
        """
        del sync
        if num_collectors not in (None, 1):
            raise ValueError(
                f"num_collectors {num_collectors}: a Collector is one, in this process; use MultiSyncCollector, "
                "MultiAsyncCollector, or RayCollector"
            )
        fns = list(create_env_fn) if isinstance(create_env_fn, list | tuple) else [create_env_fn]
        given = {"frames_per_batch": frames_per_batch, "total_frames": -1, "vectorization": "inline", **kwargs}
        given |= {"backend": backend, "backend_options": backend_options}
        settings = read_settings(_without_schemes(given), num_collectors=1)
        makers = share_out(fns, create_env_kwargs, len(fns), 1)
        super().__init__(
            CollectionPlan(mode="async", makers=makers, policy=policy, settings=settings, seed=_drawn_seed())
        )

    def _all_parts(self) -> list[WorkerOverrides]:
        (parts,) = super()._all_parts()
        (said,) = devices_of(self._settings.policy_device, "policy_device", 1, is_remote=False)
        (general,) = devices_of(self._settings.device, "device", 1, is_remote=False)
        own = str(device_of(self._policy))
        device = said or general or own
        is_own = torch.device(device) == torch.device(own)
        if parts.policy_factory is not None:
            return [replace(parts, device=device)]
        acting = self._policy if is_own else copy.deepcopy(self._policy)
        return [replace(parts, policy=acting, device=device, shares_policy=is_own)]

    def _open(self, job: CollectorJob, parts: Sequence[WorkerOverrides]) -> Any:
        return InProcessFleet(job, parts[0])

    @property
    def env(self) -> Any:
        """The environment as it was given, or as its maker made it; of several, a list."""
        made = [maker.made for maker in self._plan.makers[0]]
        return made[0] if len(made) == 1 else made

    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros, as the next one will be shaped. Nothing is stepped, and no hook is called."""
        counts = self._counts
        self._counts = None if counts is None else StepCounts()
        try:
            return self._deliver(self.fleet.blank())
        finally:
            self._counts = counts

    def reset(self) -> None:
        self.fleet.restart()
        self._forget_episodes()


class _MultiCollector(FleetCollector):
    mode: Mode

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: Any,
        num_workers: int | None = None,
        create_env_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        """Start the collectors and wait until each of them stands at its first observation.

        Args:
            create_env_fn: a list of callables that make an environment, or of environments: one a collector. A callable
                alone makes one each of `num_workers` collectors.
            policy: a TensorDictModule, a module, a callable; None: random actions.
            frames_per_batch: frames of a batch: of all collectors together (sync), or of each (async); or a list of
                each collector's, which must be equal.
            num_workers: collectors; with a list as many as it has.
            create_env_kwargs: keyword arguments of the callables, for all or for each.
            **kwargs: see `CollectorSettings`.

        Raises:
            ValueError, TypeError: arguments that cannot be; before anything starts.
            WorkerFailed: a collector cannot start; says why.
        """
        is_list = isinstance(create_env_fn, list | tuple)
        if is_list and num_workers not in (None, len(create_env_fn)):
            raise ValueError(
                f"create_env_fn has {len(create_env_fn)} entries and num_workers is {num_workers}; give one of them"
            )
        makers = share_out(create_env_fn, create_env_kwargs, 1, len(create_env_fn) if is_list else num_workers)
        if isinstance(frames_per_batch, list | tuple):
            if len(frames_per_batch) != len(makers) or (self.mode == "sync" and len(set(frames_per_batch)) != 1):
                raise ValueError(
                    f"frames_per_batch {list(frames_per_batch)} for {len(makers)} collectors: the batches of a fleet "
                    "have one layout; give one number for all, or equal ones"
                )
            frames_per_batch = sum(frames_per_batch)
        given = {"frames_per_batch": frames_per_batch, "total_frames": -1, **kwargs}
        settings = read_settings(_without_schemes(given), num_collectors=len(makers))
        super().__init__(
            CollectionPlan(mode=self.mode, makers=makers, policy=policy, settings=settings, seed=_drawn_seed())
        )


class MultiSyncCollector(_MultiCollector):
    """Collectors in processes, as TorchRL's: one batch `[W, ...]` of all, and nothing is stepped until the next."""

    mode = "sync"


class MultiAsyncCollector(_MultiCollector):
    """Collectors in processes, as TorchRL's: batches as they come, and collectors go on meanwhile."""

    mode = "async"


class AsyncCollector(MultiAsyncCollector):
    """One collector in a process of its own, which goes on while the learner learns."""

    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any) -> None:
        """As `MultiAsyncCollector`, of one maker or environment."""
        super().__init__([create_env_fn] if is_env(create_env_fn) else create_env_fn, policy, **kwargs)


SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector  # noqa: N816  # TorchRL's own name


def _drawn_seed() -> int:
    # From torch's generator, so that `torch.manual_seed` fixes it and two collectors differ.
    return int(torch.randint(_SEEDS, (1,)))


def _without_schemes(given: Mapping[str, Any]) -> dict[str, Any]:
    """TorchRL's own schemes for the policy's weights mean what happens here anyway."""
    schemes = given.get("weight_sync_schemes") or {}
    if set(schemes) <= {"policy"} and all(type(scheme).__name__ in _SCHEMES for scheme in schemes.values()):
        return {name: value for name, value in given.items() if name != "weight_sync_schemes"}
    return dict(given)
