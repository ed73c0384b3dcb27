"""Metrics and their labels, as processes, dashboards, rules and docs use them. Plain data.

No label grows with time: no ids, no versions, no addresses.
"""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
Exporter = Literal["head", "worker", "operator"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format, as every process exports it."""
_PARTS = ("_bucket", "_count", "_sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label and its possible values."""

    name: str
    help: str
    values: tuple[str, ...] = ()
    """All possible values; empty: the manifest or the cluster determines them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """Name as scraped; counters end with `_total`."""
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without +Inf."""
    when: str = ""
    """Condition under which it is exported; empty: always."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of its labels, except those that scraping adds."""
        return tuple(label.name for label in self.labels)

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names of its samples. A histogram of negative values has no sum, because it could decrease."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(self.name + part for part in (_PARTS if self.buckets[0] >= 0 else _PARTS[:2]))


class MetricList(list[Metric]):
    """Declares metrics in order, all with a prefix and with labels of their own before those of each."""

    def __init__(self, prefix: str, *labels: Label) -> None:
        super().__init__()
        self._prefix, self._labels = prefix, labels

    def _declare(self, kind: Kind, name: str, help_: str, labels: tuple[Label, ...], **more: Any) -> Metric:
        metric = Metric(name=self._prefix + name, kind=kind, help=help_, labels=(*self._labels, *labels), **more)
        self.append(metric)
        return metric

    def counter(self, name: str, help_: str, *labels: Label, when: str = "") -> Metric:
        return self._declare("counter", name, help_, labels, when=when)

    def gauge(self, name: str, help_: str, *labels: Label, when: str = "") -> Metric:
        return self._declare("gauge", name, help_, labels, when=when)

    def histogram(self, name: str, help_: str, *labels: Label, buckets: tuple[float, ...]) -> Metric:
        return self._declare("histogram", name, help_, labels, buckets=buckets)


ACTIVITIES = ("env", "inference", "transfer", "weights", "store", "idle", "paused", "build")
"""Activities that a worker's time is spent on, in the order in which workers report them."""
DROP_REASONS = ("crash", "stale", "drop_oldest", "drain", "restore", "seed", "stale_for_consumer")
UPDATE_RESULTS = ("applied", "partially_applied", "failed", "superseded", "rejected")
UPDATE_STAGES = ("receive", "verify", "distribute", "apply", "total")
HEAD_STATES = ("starting", "running", "paused", "draining", "completing", "completed", "failed")

COLLECTORJOB = Label(name="collectorjob", help="Name of the job.")
GROUP = Label(name="group", help="Worker group, as the manifest names it.")
ENV = Label(name="env", help="Environment: EnvPool's task, gymnasium's id, or the entrypoint.")
PHASE = Label(
    name="phase",
    help="env: waiting for environments. inference: policy forward pass. transfer: writing rows, and the "
    "rest of the loop. weights: applying new weights. store: writing to the dataset. idle: the queue is "
    "full or there is no work. paused: paused. build: creating environments and policy.",
    values=ACTIVITIES,
)
END = Label(name="end", help="How an episode ended.", values=("terminated", "truncated"))
DROPPED_FOR = Label(
    name="reason",
    help="crash: lost with a worker. stale: exceeded the staleness bound. drop_oldest: the queue was full. "
    "drain: unfinished at the end. restore, seed: discarded by these operations. stale_for_consumer: older "
    "than a consumer accepts.",
    values=DROP_REASONS,
)
METRIC = Label(
    name="name", help="Name of the metric in `collection.episodeMetrics`; of a variant return and length, too."
)
STATISTICS_KEY = Label(
    name="key",
    help="What `collection.normalize` keeps statistics of: a leaf of the observation, or next/reward, whose statistics "
    "are those of the discounted return.",
)
BOUND = Label(name="bound", help="lowest, highest: over the values of the key.", values=("lowest", "highest"))
TASK = Label(name="task", help="Variant of the environment; empty without variants.")
RESTARTED_FOR = Label(
    name="reason",
    help="crash: the process ended. hang: no progress, killed. error: failed with a reason.",
    values=("crash", "hang", "error"),
)
SIDE = Label(
    name="side",
    help="producer: workers waiting for room in the queue. consumer: consumers waiting for a batch.",
    values=("producer", "consumer"),
)
PATH = Label(
    name="path",
    help="queue: rounds accepted. http: sent in a response. memory: mapped by a consumer on the same machine.",
    values=("queue", "http", "memory"),
)
RESULT = Label(
    name="result",
    help="applied: every worker uses it. partially_applied: some workers are late. failed: no worker "
    "acknowledged it. superseded: a newer update came first. rejected: refused before any worker received "
    "it. An update that is applied late counts under both results.",
    values=UPDATE_RESULTS,
)
STAGE = Label(
    name="stage",
    help="receive: request body. verify: tensors. distribute: to the fleet. apply: until the last worker's "
    "receipt. total: all stages.",
    values=UPDATE_STAGES,
)
WORKER_STATE = Label(
    name="state",
    help="desired: slots to fill. ready: workers that can collect. starting: all others.",
    values=("desired", "ready", "starting"),
)
HEAD_STATE = Label(name="state", help="State of the head; one is 1, the others 0.", values=HEAD_STATES)
HEARD = Label(
    name="state",
    help="answering: valid answer. silent: no readable answer. refusing: rejects the operator's token.",
    values=("answering", "silent", "refusing"),
)
GPU = Label(name="gpu", help="Index of the device.")
VERSION = Label(name="version", help="Version of Cormorant.")
PYTHON = Label(name="python", help="Python version.")
TORCH = Label(name="torch", help="PyTorch version.")

JOB_NAMESPACE = Label(name="job_namespace", help="Namespace of the job.")
JOB = Label(name="collectorjob", help="Name of the job.")
JOB_PHASE = Label(name="phase", help="`status.phase`; the current phase is 1, others are not exported.")
HANDLER = Label(
    name="handler",
    help="reconcile: a full reconcile. poll: a request to a head. counters: a write of counters only.",
    values=("reconcile", "poll", "counters"),
)  # fmt: skip
API_METHOD = Label(
    name="method", help="HTTP method of a request to the API server.", values=("GET", "POST", "PATCH", "PUT", "DELETE")
)
CODE = Label(name="code", help="Status code of the API server's answer; 0: no answer.")
QUEUE = Label(
    name="queue",
    help="jobs: waiting for a reconcile. heads: waiting for a poll. counters: waiting for a write.",
    values=("jobs", "heads", "counters"),
)
