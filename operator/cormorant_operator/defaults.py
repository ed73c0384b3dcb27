"""What one installation of the operator gives all its jobs. Read by `reconcile`; made by `settings`."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDefaults:
    """Defaults and paces of one installation."""

    image: str = "cormorant:dev"
    """Image of jobs that name none: the operator's own."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets, in each job's namespace."""
    has_fixed_user: bool = True
    """Pods run as one fixed user; off where the platform gives each namespace users of its own, as OpenShift does."""
    architectures: tuple[str, ...] = ()
    """Of `image`, as nodes are labelled; none: unknown."""
    has_network_policies: bool = False
    """Each job gets a NetworkPolicy: its pods hear each other, and others by the ports of the API and of metrics."""
    open_to_cidrs: tuple[str, ...] = ()
    """Addresses outside the cluster that such a policy lets in to the same ports."""
    poll_s: float = 15.0
    """Between two looks at a head."""
    fast_poll_s: float = 2.0
    """The same, while something waits for the head's answer."""
    counters_interval_s: float = 15.0
    """Between two status writes of which nothing but the counters is new, at least: with many jobs the controller
    stretches it."""
    counters_per_s: float = 35.0
    """Status writes a second of which nothing but the counters is new, of all jobs together."""
    quick_resync_s: float = 300.0
    """Between two looks at the first page of each kind: whether watches have missed that all of it went."""
    quick_resyncs: int = 11
    """Such looks between two full lists; watches tell of changes in between."""
    resync_retry_s: float = 10.0
    """After a full list that failed."""
    max_creates: int = 50
    """Pods that one reconcile creates; the next one goes on."""
    head_grace_s: int = 60
    """A head's time from SIGTERM to SIGKILL: it drains for half of it."""
    worker_grace_s: int = 60
    """The same for workers, which finish or hand over their batch."""

    def for_jobs(self, number: int) -> "OperatorDefaults":
        """With so many jobs that collect, counters are written so rarely that all of them fit into their share."""
        needed_s = number / self.counters_per_s
        return replace(self, counters_interval_s=needed_s) if needed_s > self.counters_interval_s else self

    @property
    def max_answer_gap_s(self) -> float:
        """Between two answers of a head: after a longer one nothing is known first-hand of the time before."""
        return max(60.0, 4 * self.poll_s)
