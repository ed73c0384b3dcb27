"""Options of a fleet beyond the manifest: sizes, devices, time limits; and on Ray. Does not import Ray."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cormorant_contract.job import CollectorJob
from cormorant_worker.envs.cpus import available_cpus
from cormorant_worker.errors import LastWorker
from cormorant_worker.normalize import Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Time limits and devices of a fleet."""

    workers: int | None = None
    """Worker processes that step environments; None: the number in the manifest's groups, at most one per CPU."""
    device: str | None = None
    """Torch device of the policies; None: "cuda" in the manifest's gpu groups, "cpu" in the others. "cuda" spreads
    local workers over the visible devices; "cuda:1" is that one."""
    overrides: Sequence[bytes] = ()
    """Environments and policies of a script, pickled by `WorkerOverrides.to_bytes()`, by the worker's index. Workers
    past the end get the last entry. May grow while the fleet runs."""
    whole_rows: bool = False
    """Round `framesPerBatch` and `totalFrames` up to whole steps of all environments, so that no batch needs a mask."""
    storing_device: str = "cpu"
    """Torch device on which batches are handed out."""
    floor_frames: int = 0
    """Frames accepted before this fleet. `totalFrames` counts from here unless a dataset has its own count."""
    statistics: Statistics | None = None
    """Normalization statistics of the frames that were acknowledged before this fleet; None: unknown."""
    starts_paused: bool = False
    """Workers start but step nothing until `resume`, so that weights can be published first."""
    waits_for_places: bool = False
    """Something else provides the machines, such as pods of a cluster: the fleet begins with the first one, at most
    `runPolicy.startupDeadlineSeconds` after its start, and waits for the others without limit and without counting
    them as lost."""
    should_stop: Callable[[], bool] = lambda: False
    """Called several times per second while the fleet waits for its first workers, which may take an hour; True ends
    the wait."""
    settled_frames: Callable[[], int] = lambda: 0
    """Frames in the head's ledger, which no later fleet collects again. Workers' pods get this count twice per second
    and report it to the next fleet, which may have been given an older count."""
    epoch: int = 0
    """Number of this fleet among those of the job: seeds and trajectory ids of earlier epochs are not used again. If
    the dataset records this epoch or a higher one, the fleet takes the next number."""
    startup_timeout_s: float = 300.0
    """Seconds from starting a worker to its first observation."""
    control_timeout_s: float = 60.0
    """Seconds for every worker to answer a control call (pause, state, ...)."""
    drain_timeout_s: float = 5.0
    """Seconds for workers to end when the fleet is closed; then they are killed."""
    seal_after_s: float = 10.0
    """Seconds after which a worker seals a shard of the dataset, with the next batch; 0: every batch is a shard."""
    hang_timeout_s: float | None = None
    """Seconds without a new frame while stepping, after which a worker is killed and replaced; None: from the
    manifest's step and reset limits, at least 120 s."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise LastWorker(f"workers is {self.workers!r}; give a number from 1 on, or None for the manifest's")
        if self.storing_device != "cpu":
            from cormorant_worker.collect.place import find_device  # imports torch

            find_device(self.storing_device)


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
    """Further arguments of `ray.init`, such as `object_store_memory`: bytes for batches in a cluster that the fleet
    starts."""


def default_workers(job: CollectorJob, *, is_this_machine: bool = True) -> int:
    """The manifest's number of workers, at least one; at most one per CPU if all share this machine."""
    wanted = sum(job.spec.size_of(group) for group in job.spec.worker_groups if not group.serves)
    return max(1, min(wanted, available_cpus()) if is_this_machine else wanted)
