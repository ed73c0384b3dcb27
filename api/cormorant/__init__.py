"""Reinforcement-learning experience: collected here or on a cluster, read as TensorDicts.

    import cormorant
    from cormorant.policies import mlp

    with cormorant.open_fleet("job.yaml", workers=2) as fleet:                    # workers on this machine
        policy = mlp(*fleet.spaces)
        for batch in fleet.batches():
            learn(policy, batch)
            fleet.publish(policy)

    with cormorant.connect("pong", namespace="rl") as fleet:                      # a job of a cluster
        ...

`cormorant.aio` has the asynchronous client, `cormorant.policies` the built-in policies, `cormorant.postproc` the
transforms of batches, `cormorant.torchrl` and `cormorant.tianshou` collectors with these libraries' APIs, and
`cormorant.errors` all public exceptions. Torch, Ray and HTTP libraries are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cormorant_contract.errors import needs

if TYPE_CHECKING:
    from tensordict import TensorDict

    from cormorant import aio as aio
    from cormorant import errors as errors
    from cormorant import policies as policies
    from cormorant import postproc as postproc
    from cormorant import tianshou as tianshou
    from cormorant import torchrl as torchrl
    from cormorant import wrappers as wrappers
    from cormorant.remote import connect as connect
    from cormorant_client import Client as Client
    from cormorant_client import Delivery as Delivery
    from cormorant_client import LearnerLink as LearnerLink
    from cormorant_contract.fleet import Batches as Batches
    from cormorant_contract.fleet import Fleet as Fleet
    from cormorant_contract.fleet import Receipt as Receipt
    from cormorant_contract.fleet import Shard as Shard
    from cormorant_contract.fleet import Stats as Stats
    from cormorant_contract.job import CollectorJob as CollectorJob
    from cormorant_worker.collect.collector import Collector as Collector
    from cormorant_worker.evaluation.results import ResultTable as ResultTable
    from cormorant_worker.fleet.options import FleetOptions as FleetOptions
    from cormorant_worker.fleet.options import RayOptions as RayOptions
    from cormorant_worker.launch import load_job as load_job
    from cormorant_worker.launch import make_collector as make_collector
    from cormorant_worker.launch import open_fleet as open_fleet
    from cormorant_worker.local_fleet import LocalFleet as LocalFleet
    from cormorant_worker.run_evaluation import evaluate as evaluate
    from cormorant_worker.sinks.reader import Dataset as Dataset
    from cormorant_worker.sinks.reader import DatasetInfo as DatasetInfo
    from cormorant_worker.sinks.reader import read_dataset as read_dataset

    Batch = TensorDict

_HOMES = {
    "cormorant.remote": ("connect",),
    "cormorant_client": ("Client", "Delivery", "LearnerLink"),
    "cormorant_contract.fleet": ("Batches", "Fleet", "Receipt", "Shard", "Stats"),
    "cormorant_contract.job": ("CollectorJob",),
    "cormorant_worker.collect.collector": ("Collector",),
    "cormorant_worker.evaluation.results": ("ResultTable",),
    "cormorant_worker.fleet.options": ("FleetOptions", "RayOptions"),
    "cormorant_worker.launch": ("load_job", "make_collector", "open_fleet"),
    "cormorant_worker.local_fleet": ("LocalFleet",),
    "cormorant_worker.run_evaluation": ("evaluate",),
    "cormorant_worker.sinks.reader": ("Dataset", "DatasetInfo", "read_dataset"),
    "tensordict": ("Batch",),  # its TensorDict
}
"""Modules that the names come from."""

__all__ = [name for names in _HOMES.values() for name in names]
_ROOMS = ("aio", "errors", "policies", "postproc", "tianshou", "torchrl", "wrappers")


if not TYPE_CHECKING:  # where it is known, every misspelled name would be Any

    def __getattr__(name: str) -> Any:
        """Import on first use."""
        if name in _ROOMS:
            return import_module(f"{__name__}.{name}")
        module = next((module for module, names in _HOMES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
        with needs("client" if module in ("cormorant_client", "cormorant.remote") else "worker"):
            return getattr(import_module(module), "TensorDict" if name == "Batch" else name)


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
