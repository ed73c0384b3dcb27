"""Metrics of a worker pod's supervisor and its worker. Their names differ from the head's, so that no sum counts
twice.
"""

from cormorant_contract.metrics.labels import COLLECTORJOB, GPU, GROUP, PHASE
from cormorant_contract.metrics.metric import Kind, Label, Metric


def _of_pod(name: str, kind: Kind, help_: str, *labels: Label, when: str = "") -> Metric:
    return Metric(
        name=f"cormorant_worker_{name}", kind=kind, help=help_, labels=(COLLECTORJOB, GROUP, *labels), when=when
    )


JOINED = _of_pod("joined", "gauge", "1 if the pod's Ray node is a member of the head's cluster.")
JOINS = _of_pod("joins_total", "counter", "Number of times the pod's Ray node joined a head.")
FRAMES = _of_pod("frames_total", "counter", "Frames stepped by workers in this pod.")
PHASE_SECONDS = _of_pod("phase_seconds_total", "counter", "Time of the worker by activity.", PHASE)
CPU_SECONDS = _of_pod("cpu_seconds_total", "counter", "CPU time of all processes of the pod.")
MEMORY = _of_pod(
    "memory_used_bytes", "gauge", "Memory used by the pod's cgroup, or by its processes if there is no cgroup."
)
_DEVICES = "the pod has NVIDIA devices"
GPU_UTILIZATION = _of_pod(
    "gpu_utilization_ratio", "gauge", "Fraction of time in which a kernel was running.", GPU, when=_DEVICES
)
GPU_MEMORY = _of_pod("gpu_memory_used_bytes", "gauge", "Device memory in use by all processes.", GPU, when=_DEVICES)

WORKER_METRICS = (JOINED, JOINS, FRAMES, PHASE_SECONDS, CPU_SECONDS, MEMORY, GPU_UTILIZATION, GPU_MEMORY)
