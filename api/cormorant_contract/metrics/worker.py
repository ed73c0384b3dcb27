"""Metrics of a worker pod's supervisor. Their names differ from the head's, so that no sum counts
twice.
"""

from cormorant_contract.metrics.labels import COLLECTORJOB, GPU, GROUP, MetricList

_METRICS = MetricList("cormorant_worker_", COLLECTORJOB, GROUP)
JOINED = _METRICS.gauge("joined", "1 if the pod's Ray node is a member of the head's cluster.")
JOINS = _METRICS.counter("joins_total", "Number of times the pod's Ray node joined a head.")
_DEVICES = "the pod has NVIDIA devices"
GPU_UTILIZATION = _METRICS.gauge(
    "gpu_utilization_ratio", "Fraction of time in which a kernel was running.", GPU, when=_DEVICES
)
GPU_MEMORY = _METRICS.gauge("gpu_memory_used_bytes", "Device memory in use by all processes.", GPU, when=_DEVICES)

WORKER_METRICS = tuple(_METRICS)
