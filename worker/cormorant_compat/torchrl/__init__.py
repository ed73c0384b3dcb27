"""TorchRL's names over our environments and fleets. TorchRL itself is optional.

    from cormorant_compat.torchrl import MultiThreadedEnv, RayCollector, sync_async_collector

Scripts import from here what they imported from `torchrl.collectors`, `torchrl.collectors.distributed` and
`torchrl.envs`. `docs/how-to/migrating-from-torchrl.md` says what is the same, renamed, put right or left out.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cormorant_compat.torchrl.collector import FleetCollector
    from cormorant_compat.torchrl.collectors import (
        AsyncCollector,
        Collector,
        MultiAsyncCollector,
        MultiaSyncDataCollector,
        MultiSyncCollector,
        MultiSyncDataCollector,
        OffPolicyCollectorConfig,
        OnPolicyCollectorConfig,
        SyncDataCollector,
        aSyncDataCollector,
        make_collector_offpolicy,
        make_collector_onpolicy,
        sync_async_collector,
        sync_sync_collector,
    )
    from cormorant_compat.torchrl.pool import MultiThreadedEnv, MultiThreadedEnvWrapper
    from cormorant_compat.torchrl.ray_collector import RayCollector

__all__ = [
    "AsyncCollector",
    "Collector",
    "FleetCollector",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiThreadedEnv",
    "MultiThreadedEnvWrapper",
    "MultiaSyncDataCollector",
    "OffPolicyCollectorConfig",
    "OnPolicyCollectorConfig",
    "RayCollector",
    "SyncDataCollector",
    "aSyncDataCollector",
    "make_collector_offpolicy",
    "make_collector_onpolicy",
    "sync_async_collector",
    "sync_sync_collector",
]

_HOMES = {
    "FleetCollector": "collector",
    "MultiThreadedEnv": "pool",
    "MultiThreadedEnvWrapper": "pool",
    "RayCollector": "ray_collector",
}
"""Modules of the names that are not in `collectors`."""


def __getattr__(name: str) -> Any:
    """Import on first use."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'collectors')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
