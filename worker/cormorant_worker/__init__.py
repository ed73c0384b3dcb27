"""Collectors, environments, sinks and engines: what runs in a worker.

`from cormorant_worker import open_fleet, make_collector` is the front door; see `front.py`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cormorant_worker.engine.local import LocalFleet
    from cormorant_worker.engine.options import FleetOptions
    from cormorant_worker.launch import load_job, make_collector, open_fleet

__all__ = ["FleetOptions", "LocalFleet", "load_job", "make_collector", "open_fleet"]

_HOMES = {
    "FleetOptions": "cormorant_worker.engine.options",
    "LocalFleet": "cormorant_worker.engine.local",
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
