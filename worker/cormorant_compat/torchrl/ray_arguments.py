"""Arguments that only RayCollector has, read and checked before anything starts."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cormorant_compat.torchrl.settings import MEANINGLESS, broadcast, exploration_of, limit, read_settings
from cormorant_contract.sentences import did_you_mean
from cormorant_worker.fleet.options import RayOptions

_CLASSES = (
    "AsyncCollector", "Collector", "FleetCollector", "MultiAsyncCollector", "MultiSyncCollector",
    "MultiSyncDataCollector", "MultiaSyncDataCollector", "SyncDataCollector", "aSyncDataCollector",
)  # fmt: skip
_CLASS_NAMES = ("single", "sync", "async")
_COLLECTING = ("max_frames_per_traj", "init_random_frames", "reset_at_each_iter", "exploration_type")
_SHARED = ("split_trajs", "postproc", "trust_policy")
"""Settings that must be equal where several collectors have them."""
_DEVICES = ("device", "storing_device", "policy_device", "env_device")
OWN_WHEN_ADDED = (*_COLLECTING, "device", "policy_device", "env_device")
"""Settings that collectors may have of their own; those that join others take the others' way for batches."""
OWN = (*_COLLECTING, *_DEVICES, *_SHARED)
_ACTOR = ("accelerator_type", "label_selector", "memory", "num_cpus", "num_gpus", "object_store_memory", "resources",
          "runtime_env", "scheduling_strategy")  # fmt: skip


def check_class(collector_class: Any) -> None:
    """TorchRL's `collector_class`: here each collector is one process that steps its environments together."""
    name = collector_class if isinstance(collector_class, str) else getattr(collector_class, "__name__", "")
    if collector_class is not None and name not in (*_CLASSES, *_CLASS_NAMES):
        raise TypeError(
            f"collector_class {collector_class!r} is none of TorchRL's collectors; leave it out: each collector is a "
            "process that steps its environments together"
        )


def own_settings(
    collector_kwargs: Any, *, num_collectors: int, given: dict[str, Any], known: Sequence[str] = OWN
) -> tuple[dict[str, Any], tuple[Mapping[str, Any], ...]]:
    """Read `collector_kwargs`: a mapping, or a list with one for each collector, of the `known` arguments. Returns
    keyword arguments for all, devices of each among them (these take the place of `given`), and each collector's own
    fields of `CollectorConfig`. Raises TypeError for an argument that a collector cannot have of its own, and
    ValueError for a list of another length, a value that cannot be, or one that all collectors have otherwise.
    """
    if collector_kwargs is None:
        return given, ({},) * num_collectors
    each = [
        {name: value for name, value in (one or {}).items() if name not in MEANINGLESS}
        for one in broadcast(collector_kwargs, "collector_kwargs", num_collectors)
    ]
    for one in each:
        if unknown := sorted(set(one) - set(known)):
            hint = did_you_mean(unknown[0], known, most=1, otherwise=f"; known: {', '.join(known)}")
            raise TypeError(f"collector_kwargs have no {unknown[0]}{hint}")
    for name in sorted(set.intersection(*map(set, each)) & set(given)):
        values = [one[name] for one in each]
        if given[name] is not None and any(str(value) != str(given[name]) for value in values):
            found = values[0] if len(set(map(str, values))) == 1 else values
            raise ValueError(f"{name} is {given[name]!r}, and collector_kwargs has {found!r}; keep one of them")
    result = dict(given)
    for name in _DEVICES:
        if any(name in one for one in each):
            usual = broadcast(given.get(name), name, num_collectors)
            result[name] = [one.get(name, usual[i]) for i, one in enumerate(each)]
    for name in _SHARED:
        values = [one[name] for one in each if name in one]
        if values and any(value != values[0] for value in values):
            raise ValueError(f"collector_kwargs.{name} differs between collectors: {values}; give one for all")
        if values:
            result[name] = values[0]
    overrides = []
    for one in each:
        own = {name: one[name] for name in _COLLECTING if name in one}
        settings = read_settings(own, num_collectors=num_collectors)
        fields = {
            "max_frames_per_traj": ("max_frames_per_trajectory", limit(settings.max_frames_per_traj)),
            "init_random_frames": ("init_random_frames", limit(settings.init_random_frames)),
            "reset_at_each_iter": ("reset_at_each_batch", settings.reset_at_each_iter),
            "exploration_type": ("exploration_type", exploration_of(settings.exploration_type)),
        }
        overrides.append(dict(fields[name] for name in own))
    return result, tuple(overrides)


def is_connected() -> bool:
    """True where this process belongs to a Ray cluster already. Who does has imported Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def ray_options(init: Mapping[str, Any] | None, remote: list[Mapping[str, Any]]) -> RayOptions:
    """How to connect, and what each actor asks for. `init`: arguments of `ray.init`; without an address RAY_ADDRESS
    counts, unless the process is connected. `remote`: arguments of `ray.remote`, for each collector; the list may grow.
    """
    arguments = dict(init or {})
    address = arguments.pop("address", None) or (None if is_connected() else os.environ.get("RAY_ADDRESS") or None)
    return RayOptions(
        address=None if address == "local" else address,
        runtime_env=arguments.pop("runtime_env", None) or {},
        object_store_bytes=arguments.pop("object_store_memory", None),
        actors=remote,
        init=arguments,
    )


def remote_options(remote_configs: Any, num_collectors: int) -> list[Mapping[str, Any]]:
    each = [dict(one or {}) for one in broadcast(remote_configs, "remote_configs", num_collectors)]
    for one in each:
        if unknown := sorted(set(one) - set(_ACTOR)):
            raise ValueError(
                f"remote_configs have {', '.join(unknown)}, which the fleet sets itself or Ray does not know; "
                f"collectors take {', '.join(_ACTOR)}"
            )
    return list(each)


def read_updater(given: Any) -> Any:
    """A `weight_updater`: the object itself, or what a callable makes."""
    is_maker = callable(given) and (isinstance(given, type) or not hasattr(given, "push_weights"))
    updater = given() if is_maker else given
    if updater is not None and not callable(getattr(updater, "push_weights", None)):
        raise TypeError(
            f"weight_updater is a {type(updater).__name__}, which has no push_weights(policy_or_weights=, "
            "worker_ids=); give an object that has it, or a callable that makes one"
        )
    return updater
