"""How a fleet uses Ray: which cluster, and what each worker asks of it. Light: imports no Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What a Ray fleet needs to know beside `FleetOptions`."""

    address: str = ""
    """Empty: start a cluster on this machine, and end it with the fleet. "auto" or "host:port": connect to one that
    runs; tokens come from RAY_AUTH_MODE and RAY_AUTH_TOKEN. A process that is connected already stays so."""
    num_cpus: float | None = None
    """CPUs that each worker asks for; None: what its group's `resources` say, else 1. In a cluster of the fleet's own,
    and with `slot_resources`, none is asked for."""
    num_gpus: float | None = None
    """GPUs that each worker asks for; None: what its group's `resources` say, else 1 where `device: gpu`; with
    `slot_resources` none."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that each worker asks for."""
    slot_resources: bool = False
    """Worker `cpu-0` asks for 1 of the resource `slot:cpu-0`, and for no CPUs and GPUs unless told to: its pod is the
    one that has it, and all of the pod is the worker's."""
    scheduling: Literal["DEFAULT", "SPREAD"] = "DEFAULT"
    """Ray's strategy: pack workers on few nodes, or spread them."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of each worker. Code that all nodes have needs none. Where the process is connected
    already, folders must be URIs: Ray uploads those on this machine as it connects."""
    actors: Sequence[Mapping[str, Any]] = ()
    """Further options of each worker's actor, by the worker's index, as `ray.remote` takes them; workers past the end
    get none. They count before the others; CPUs are not asked for in a cluster of the fleet's own. May grow while the
    fleet runs."""
    init: Mapping[str, Any] = field(default_factory=dict)
    object_store_bytes: int = 0
    """Memory for batches in a cluster of the fleet's own, at least 78,643,200; 0: Ray's default, 30 % of the machine's
    memory."""
