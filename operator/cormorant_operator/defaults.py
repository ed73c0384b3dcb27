"""Defaults and intervals of one operator installation, built by `settings` and read by `reconcile`."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDefaults:
    image: str = "cormorant:dev"
    """Image of jobs that do not set `spec.image`."""
    cuda_image: str = ""
    """Image of these jobs' workers with a device; empty: `image`."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, in each job's namespace."""
    has_fixed_user: bool = True
    """Pods run as user 65532. Off on platforms that assign users per namespace, such as OpenShift."""
    architectures: tuple[str, ...] = ()
    """CPU architectures of `image` (label kubernetes.io/arch); empty: unknown."""
    has_image_volumes: bool = False
    """The cluster mounts images as volumes; otherwise an init container copies `spec.code.image`."""
    has_network_policies: bool = False
    """Each job gets a NetworkPolicy."""
    has_pod_groups: bool = False
    """The API server serves PodGroups: each job without a queue gets one. Found out by the controller."""
    open_to_cidrs: tuple[str, ...] = ()
    """CIDRs outside the cluster that this policy admits."""
    poll_s: float = 15.0
    """Interval of polling a head."""
    fast_poll_s: float = 2.0
    """Polling interval while a decision waits for the head's answer."""
    counters_interval_s: float = 15.0
    """Minimum interval between counter-only status writes of one job; `for_jobs` stretches it."""
    counters_per_s: float = 42.5
    """Budget of counter-only status writes per second, for all jobs."""
    quick_resync_s: float = 300.0
    """Interval of listing the first page of each kind, which shows objects that watches missed."""
    quick_resyncs: int = 11
    """Quick resyncs between two full ones."""
    resync_retry_s: float = 10.0
    """Delay after a failed resync."""
    stood_still_s: float = 10.0
    """If the operator stood still for longer, it has missed events."""
    max_creates: int = 50
    """Pods created per reconcile; the next reconcile creates more."""
    head_grace_s: int = 60
    """Time of a head from SIGTERM to SIGKILL; it drains for half of it."""
    worker_grace_s: int = 60
    """Time of a worker from SIGTERM to SIGKILL, for finishing its batch."""

    def for_jobs(self, number: int) -> "OperatorDefaults":
        """Stretch `counters_interval_s` so that this many jobs stay within `counters_per_s`."""
        needed_s = number / self.counters_per_s
        return replace(self, counters_interval_s=needed_s) if needed_s > self.counters_interval_s else self
