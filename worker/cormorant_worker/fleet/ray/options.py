"""Options of a fleet on Ray: the cluster, and each worker's resources. Does not import Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cormorant_contract.arguments import check_types, refuse_empty
from cormorant_contract.job import CollectorJob
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.errors import ManifestError

_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of a fleet on a Ray cluster, in addition to `FleetOptions`."""

    address: str | None = None
    """None: start a cluster on this machine, and stop it with the fleet. "auto" or "host:port": connect to a running
    one; tokens are read from RAY_AUTH_MODE and RAY_AUTH_TOKEN. An existing connection of the process is kept."""
    num_cpus: float | None = None
    """CPUs that each worker requests; None: those of its group's `resources`, else 1. None also means no CPUs in a
    cluster that the fleet starts, and with `slot_resources`."""
    num_gpus: float | None = None
    """GPUs that each worker requests; None: those of its group's `resources`, else 1 with `device: gpu`; none with
    `slot_resources`."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that each worker requests."""
    slot_resources: bool = False
    """Worker `cpu-0` requests 1 of the resource `slot:cpu-0`, which only its pod offers, and may use the whole pod. It
    requests CPUs and GPUs only where `num_cpus` and `num_gpus` say so."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of each worker; not needed for code that all nodes have. If the process is already
    connected, folders must be URIs, because Ray uploads local folders only when it connects."""
    actors: Sequence[Mapping[str, Any]] = ()
    """Further `ray.remote` options for each worker's actor, by the worker's index; workers past the end get none. They
    override the other options. In a cluster that the fleet starts, no CPUs are requested. May grow while the fleet
    runs."""
    init: Mapping[str, Any] = field(default_factory=dict)
    object_store_bytes: int | None = None
    """Memory for batches in a cluster that the fleet starts, at least 78,643,200; None: Ray's default, 30 % of the
    machine's memory."""

    def __post_init__(self) -> None:
        refuse_empty(ManifestError, address=self.address, object_store_bytes=self.object_store_bytes)
        check_types(ManifestError, RayOptions.__annotations__, {name: getattr(self, name) for name in self.__slots__})


def actor_options(job: CollectorJob, place: WorkerPlace, options: RayOptions, *, is_own: bool) -> dict[str, Any]:
    """Options of a worker's actor for `ray.remote`. `is_own`: only this fleet uses the cluster, so CPUs need no
    accounting. Raises ManifestError where a quantity in the group's requests and limits cannot be read.
    """
    group = next(known for known in job.spec.worker_groups if known.name == place.group)
    cpus, gpus = _quantity(group.resources, "cpu", group.name), _quantity(group.resources, _GPU, group.name)
    if gpus is None:
        gpus = float(place.device.startswith("cuda"))
    slot: dict[str, float] = {}
    if options.slot_resources:
        # The slot is a whole pod: Kubernetes has counted its CPUs and devices, and all of them are this worker's.
        cpus, gpus, slot = 0.0, 0.0, {f"slot:{place.group}-{place.index}": 1.0}
    elif is_own:
        cpus = 0.0
    own = dict(options.actors[place.index]) if place.index < len(options.actors) else {}
    asked_cpus = options.num_cpus if options.num_cpus is not None else 1.0 if cpus is None else cpus
    return {
        **own,
        "num_cpus": asked_cpus if is_own else own.get("num_cpus", asked_cpus),
        "num_gpus": own.get("num_gpus", gpus if options.num_gpus is None else options.num_gpus),
        "resources": {**options.resources, **slot, **own.get("resources", {})},
    }


def describe_resources(resources: Mapping[str, float]) -> str:
    """Amounts as text: "CPU: 4, GPU: 1", without those that are 0."""
    return ", ".join(f"{name}: {amount:g}" for name, amount in sorted(resources.items()) if amount) or "nothing"


def _quantity(resources: Mapping[str, Any], name: str, group: str) -> float | None:
    """A Kubernetes quantity of whole or milli units, from the requests or else the limits."""
    for kind in ("requests", "limits"):
        value = (resources.get(kind) or {}).get(name)
        if value is None:
            continue
        text = str(value)
        try:
            return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
        except ValueError as error:
            raise ManifestError(
                f'workerGroups "{group}": resources.{kind}["{name}"] is {value!r}; write a number as 2, "0.5" or "500m"'
            ) from error
    return None
