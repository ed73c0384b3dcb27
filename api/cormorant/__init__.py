"""Reinforcement-learning experience: collected here or on a cluster, read as TensorDicts.

    import cormorant
    from cormorant.policies import mlp

    with cormorant.open_fleet("job.yaml", workers=2) as fleet:                    # workers on this machine
        policy = mlp(*fleet.spaces)
        for batch in fleet.batches():
            learn(policy, batch)
            fleet.publish(policy.state_dict())

    with cormorant.connect("http://127.0.0.1:8000", token=token) as client:       # a job that runs elsewhere
        ...

`cormorant.aio` has the asynchronous client, `cormorant.policies` the policies that ship, `cormorant.postproc` what can
be made of batches, `cormorant.torchrl` and `cormorant.tianshou` those libraries' collectors, `cormorant.errors` all
that is raised on purpose. Torch, Ray and HTTP are imported by what needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cormorant_client import Batch, Client, LearnerLink, ReplayFeed, as_dataset, connect
    from cormorant_contract.job import CollectorJob
    from cormorant_worker.collect.collector import Collector
    from cormorant_worker.evaluation.results import ResultTable
    from cormorant_worker.fleet.fleet import Fleet
    from cormorant_worker.fleet.options import FleetOptions
    from cormorant_worker.fleet.ray.options import RayOptions
    from cormorant_worker.fleet.stats import Receipt
    from cormorant_worker.launch import load_job, make_collector, open_fleet
    from cormorant_worker.run_evaluation import evaluate
    from cormorant_worker.sinks.reader import Dataset, DatasetInfo, read_dataset

__all__ = [
    "Batch",
    "Client",
    "Collector",
    "CollectorJob",
    "Dataset",
    "DatasetInfo",
    "Fleet",
    "FleetOptions",
    "LearnerLink",
    "RayOptions",
    "Receipt",
    "ReplayFeed",
    "ResultTable",
    "as_dataset",
    "connect",
    "evaluate",
    "load_job",
    "make_collector",
    "open_fleet",
    "read_dataset",
]

_HOMES = {
    "Collector": "cormorant_worker.collect.collector",
    "CollectorJob": "cormorant_contract.job",
    "Dataset": "cormorant_worker.sinks.reader",
    "DatasetInfo": "cormorant_worker.sinks.reader",
    "Fleet": "cormorant_worker.fleet.fleet",
    "FleetOptions": "cormorant_worker.fleet.options",
    "RayOptions": "cormorant_worker.fleet.ray.options",
    "Receipt": "cormorant_worker.fleet.stats",
    "ResultTable": "cormorant_worker.evaluation.results",
    "evaluate": "cormorant_worker.run_evaluation",
    "load_job": "cormorant_worker.launch",
    "make_collector": "cormorant_worker.launch",
    "open_fleet": "cormorant_worker.launch",
    "read_dataset": "cormorant_worker.sinks.reader",
}
"""Modules of the names that are not the client's."""


def __getattr__(name: str) -> Any:
    """Import on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES.get(name, "cormorant_client")), name)


def __dir__() -> list[str]:
    return __all__
