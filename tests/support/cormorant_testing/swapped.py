"""A pytest plugin for the peers' own tests: their collectors are exchanged for ours. `-p cormorant_testing.swapped`

Their tests are theirs to run, unchanged: the names are exchanged where they are looked up, before any test is imported.
"""

import os
from importlib import import_module

import pytest

OURS = {
    "tianshou.data": ("cormorant_compat.tianshou", ("AsyncCollector", "Collector")),
    "torchrl.collectors": (
        "cormorant_compat.torchrl",
        ("AsyncCollector", "Collector", "MultiAsyncCollector", "MultiSyncCollector"),
    ),
    "torchrl.collectors.utils": ("cormorant_postproc", ("split_trajectories",)),
    "torchrl.data.postprocs.postprocs": ("cormorant_postproc", ("MultiStep",)),
    "torchrl.envs": ("cormorant_compat.torchrl", ("MultiThreadedEnv", "MultiThreadedEnvWrapper")),
    "torchrl.envs.libs.envpool": ("cormorant_compat.torchrl", ("MultiThreadedEnv", "MultiThreadedEnvWrapper")),
}
"""By module of a peer: the module that has ours, and the names."""

NOT_OURS = ("TestLibThreading", "test_ray_collector_stats", "test_ray_map_fn_and_get_distant_attr")
"""Tests of TorchRL's own classes: of RayCollector, and in processes that they spawn, where no name is exchanged."""

for theirs, (ours, names) in OURS.items():
    # One peer alone: TorchRL's import makes every process of Tianshou's environments a spawned one.
    if theirs.partition(".")[0] == os.environ.get("SWAPPED_PEER"):
        for name in names:
            setattr(import_module(theirs), name, getattr(import_module(ours), name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `NOT_OURS`. With `SWAPPED_VARIANTS=one`, run one variant of each test: the shortest name, of collectors
    in this process where there is one.
    """
    chosen = [item for item in items if not any(name in item.nodeid for name in NOT_OURS)]
    if os.environ.get("SWAPPED_VARIANTS") == "one":
        variants: dict[str, list[pytest.Item]] = {}
        for item in chosen:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
        chosen = [min(found, key=_rank) for found in variants.values()]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _rank(item: pytest.Item) -> tuple[bool, int, str]:
    return "Multi" in item.name or "Async" in item.name, len(item.name), item.name
