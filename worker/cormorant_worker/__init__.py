"""Collectors, environments, policies, datasets and fleets. The Python API is in `launch.py`:

from cormorant_worker import make_collector, open_fleet
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cormorant_worker.fleet.fleet import Fleet
    from cormorant_worker.fleet.options import FleetOptions
    from cormorant_worker.launch import load_job, make_collector, open_fleet
    from cormorant_worker.run_evaluation import evaluate

__all__ = ["FleetOptions", "Fleet", "evaluate", "load_job", "make_collector", "open_fleet"]

_HOMES = {
    "FleetOptions": "cormorant_worker.fleet.options",
    "Fleet": "cormorant_worker.fleet.fleet",
    "evaluate": "cormorant_worker.run_evaluation",
    "load_job": "cormorant_worker.launch",
    "make_collector": "cormorant_worker.launch",
    "open_fleet": "cormorant_worker.launch",
}


def __getattr__(name: str) -> Any:
    """Import on first use: processes of subprocess environments import this package and must stay without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
