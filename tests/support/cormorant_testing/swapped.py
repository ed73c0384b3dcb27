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
    "torchrl.collectors.distributed.ray": ("cormorant_compat.torchrl", ("RayCollector",)),
    "torchrl.collectors.utils": ("cormorant_postproc", ("split_trajectories",)),
    "torchrl.data.postprocs.postprocs": ("cormorant_postproc", ("MultiStep",)),
    "torchrl.envs": ("cormorant_compat.torchrl", ("MultiThreadedEnv", "MultiThreadedEnvWrapper")),
    "torchrl.envs.libs.envpool": ("cormorant_compat.torchrl", ("MultiThreadedEnv", "MultiThreadedEnvWrapper")),
}
"""By module of a peer: the module that has ours, and the names."""

NOT_OURS = {
    "TestLibThreading": "runs in a process that it spawns, where no name is exchanged",
    "test_env_that_waits": "runs in a process that it spawns, where no name is exchanged",
    "test_backend_dispatch[": "replaces TorchRL's own class by a mock, which its own Collector would call",
    "test_context_backend_dispatch": "replaces TorchRL's own class by a mock, which its own Collector would call",
    "test_sequence_inference_and_options_are_not_mutated": "replaces TorchRL's own class by a mock",
    "test_concrete_default_divergences_are_pinned": "compares the signatures of TorchRL's own classes",
}
"""By part of a test's name: why its failure or success would say nothing about our collectors."""

for theirs, (ours, names) in OURS.items():
    # One peer alone: TorchRL's import makes every process of Tianshou's environments a spawned one.
    if theirs.partition(".")[0] == os.environ.get("SWAPPED_PEER"):
        for name in names:
            setattr(import_module(theirs), name, getattr(import_module(ours), name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `NOT_OURS`. With `SWAPPED_VARIANTS=one`, run one variant of each test, the one with the shortest name,
    and where variants differ in that, one of a collector in this process and one of a fleet.
    """
    chosen = [item for item in items if not any(name in item.nodeid for name in NOT_OURS)]
    if os.environ.get("SWAPPED_VARIANTS") == "one":
        variants: dict[tuple[str, bool], list[pytest.Item]] = {}
        for item in chosen:
            is_fleet = "Multi" in item.name or "Async" in item.name
            variants.setdefault((item.nodeid.partition("[")[0], is_fleet), []).append(item)
        chosen = [min(found, key=lambda item: (len(item.name), item.name)) for found in variants.values()]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
