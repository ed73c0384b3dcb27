"""`spec`: what to collect, with which pods, and the rules between its parts; `spec.output` and `spec.runPolicy`."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import (
    CONTROLLER_PATTERN,
    OPTIONAL_LABEL_PATTERN,
    Contract,
    Count32,
    CountOrPercent,
    Flag,
    Text,
    Whole,
    keyed_by,
)
from cormorant_contract.collection import Collection
from cormorant_contract.env import KINDS, Env
from cormorant_contract.episodes import MAX_CHECKPOINTS
from cormorant_contract.policy import Code, Policy
from cormorant_contract.rule import Rule, each_once
from cormorant_contract.workers import ClaimName, Head, Inference, Replicas, WorkerGroup


class RunPolicy(Contract):
    """Deadlines, restart limits, and what happens to a finished job."""

    max_head_restarts: Count32 = 6
    """Failures of the head after which the job fails. Evictions and preemptions do not count."""

    max_restarts_per_slot: Count32 = 10
    """Failures of the worker in one slot after which the job fails."""

    startup_deadline_seconds: Count32 = 1800
    """Time after which a job fails that has collected nothing, or is not ready although its pods can be scheduled. 0
    means no deadline."""

    progress_deadline_seconds: Count32 = 600
    """Time without a new frame after which the job counts as stalled. 0 means never. Waiting for a learner and
    pauses do not count."""

    on_stall: Literal["Restart", "Fail"] = "Restart"
    """Reaction to a stall: a new head and new workers, or failure."""

    unschedulable_after_seconds: Count32 = 600
    """Time that a pod may wait for a node before onUnschedulable acts. 0 means without limit."""

    on_unschedulable: Literal["Wait", "ScaleToFit", "Fail"] = "Wait"
    """Reaction when pods find no node: wait, run with the workers that fit, or fail."""

    max_unavailable: CountOrPercent = 1
    """Workers that a change of image or template may take away at one time: a number, or a percentage of all workers
    like 5%, rounded down, at least one."""

    drain_seconds: Count32 = 600
    """Time for learners to take the last batches after the last frame, and for workers to finish a batch when they are
    suspended or scaled down."""

    ttl_seconds_after_finished: Count32 | None = None
    """Time after which a completed or failed job is deleted. Unset: never, as with a Job of batch/v1."""

    clean_pod_policy: Literal["None", "Workers", "All"] = "Workers"
    """Pods that are deleted when the job ends; the head's pod keeps the logs."""

    disruption_budget: Literal["None", "Head", "All"] = "Head"
    """Pods that a drain of nodes may not evict: none, the head, or the head and all workers but
    maxUnavailable."""

    def unavailable_of(self, workers: int) -> int:
        """Number of `count` workers that a change may take away at a time."""
        if isinstance(self.max_unavailable, str):
            return max(1, workers * int(self.max_unavailable.removesuffix("%")) // 100)
        return self.max_unavailable


class QueueOutput(Contract):
    """A bounded queue that learners read batches from."""

    capacity_batches: Annotated[Whole, Field(ge=1, le=65536)] = 16
    """Maximum number of batches that wait for a learner."""

    on_full: Literal["wait", "drop_oldest"] = "wait"
    """Behavior of a full queue. wait: workers stop stepping until a learner takes a batch. drop_oldest: the
    oldest batch is dropped."""


class DatasetOutput(Contract):
    """A durable dataset of immutable shards."""

    uri: Annotated[str, Field(strict=True, min_length=1, max_length=1024)]
    """Folder of the dataset: file:// or any URI supported by fsspec. Each worker writes its own part in it."""

    secret: ClaimName = ""
    """Secret in the job's namespace. Its keys are environment variables of head and workers: AWS_ACCESS_KEY_ID, ..."""

    format: Literal["shards"] = "shards"
    """Layout on disk; `cormorant dataset export` converts it to other formats."""


class Output(Contract):
    """Where batches go; at least one of queue and dataset."""

    queue: QueueOutput | None = None
    """A bounded queue for learners; {} for its defaults."""

    dataset: DatasetOutput | None = None
    """A durable dataset."""

    rules = (
        Rule(
            cel="has(self.queue) || has(self.dataset)",
            sentence="queue and dataset are both missing; add at least one of them, for example queue: {}",
        ),
    )


CONTROLLER = "cormorant.dev/operator"
"""`managedBy` of jobs that the operator manages."""
MAX_WORKER_GROUPS = 8
WorkerGroups = Annotated[
    tuple[WorkerGroup, ...], Field(min_length=1, max_length=MAX_WORKER_GROUPS, json_schema_extra=keyed_by("name"))
]

_NUM_ENVS = f"({''.join(f'has(self.env.{kind}) ? self.env.{kind}.numEnvs : ' for kind in KINDS)}1)"
_SHAPED = "self.env.info.exists(i, i.key == m.key && has(i.shape) && i.shape.size() > 0)"
_UNDECLARED = "!has(self.env.info) || !self.env.info.exists(i, i.key == m.key)"

_ELASTIC = "(self.elasticGroup == '' ? self.workerGroups[0].name : self.elasticGroup)"
_LOW, _HIGH = "(has(g.minReplicas) ? g.minReplicas : 0)", "(has(g.maxReplicas) ? g.maxReplicas : 9999)"
"""CEL: the bounds of group g."""
_NO_ELASTIC = f"!self.workerGroups.exists(g, g.name == {_ELASTIC})"


def _num_pairings(spec: "CollectorJobSpec") -> int:
    episodes = spec.collection.episodes
    return 0 if episodes is None else episodes.num_pairings(len(spec.policy.playing))


_GROUPS = {"name": _ELASTIC, "names": "self.workerGroups.map(g, g.name)"}
"""Values of sentences: the elastic group's name, and those of all groups."""
_SERVERS = "(has(g.role) && g.role == 'inference')"
"""CEL: group g has role inference."""

_RULES: tuple[Rule, ...] = (
    # -- batches and metrics
    Rule(
        cel=f"self.collection.framesPerBatch % {_NUM_ENVS} == 0",  # an env of no or several kinds has its own rule
        sentence="framesPerBatch {self.collection.framesPerBatch} is not a multiple of numEnvs {envs}; write a "
        "multiple of it, for example {example}",
        values={
            "envs": _NUM_ENVS,
            "example": f"[{_NUM_ENVS}].map(n, (self.collection.framesPerBatch / n + 1) * n)[0]",
        },
        path=("collection", "framesPerBatch"),
    ),
    Rule(
        cel=f"!has(self.collection.episodeMetrics) || !self.collection.episodeMetrics.exists(m, {_UNDECLARED})",
        sentence="the metric {name} reads a key that env.info does not declare; add the key to env.info, "
        "which has {keys}, or remove the metric",
        values={
            "name": f"self.collection.episodeMetrics.filter(m, {_UNDECLARED})[0].name",
            "keys": "(has(self.env.info) ? self.env.info.map(i, i.key) : [])",
        },
        path=("collection", "episodeMetrics"),
    ),
    Rule(
        cel=f"!has(self.collection.episodeMetrics) || !has(self.env.info) || "
        f"!self.collection.episodeMetrics.exists(m, {_SHAPED})",
        sentence="the metric {name} reads a key with a shape; a metric is made of single numbers: use another key",
        values={"name": f"self.collection.episodeMetrics.filter(m, {_SHAPED})[0].name"},
        path=("collection", "episodeMetrics"),
    ),
    # -- evaluations
    Rule(
        cel="!has(self.collection.episodes) || (has(self.output.dataset) && !has(self.output.queue))",
        sentence="collection.episodes needs a folder for its results and delivers no batches; set "
        "output.dataset.uri and remove output.queue",
        path=("output",),
    ),
    Rule(
        cel=f"!has(self.collection.episodes) || !self.workerGroups.exists(g, {_SERVERS})",
        sentence="an evaluation asks the policy for one row at a time, in the workers; remove the groups with role "
        "inference",
        path=("workerGroups",),
    ),
    Rule(
        cel="!has(self.collection.episodes) || !has(self.collection.episodes.resetOptions) || "
        "(!has(self.env.envpool) && !has(self.env.jax))",
        sentence="resetOptions need a gymnasium environment: EnvPool's and JAX's take no options at a reset; use seeds",
        path=("collection", "episodes"),
    ),
    Rule(
        cel="!has(self.collection.episodes) || self.collection.episodes.perTask || has(self.env.variants)",
        sentence="perTask: false shares the episodes among env.variants, and there are none; remove perTask, or "
        "add variants",
        path=("collection", "episodes"),
    ),
    Rule(
        cel="!has(self.collection.episodes) || !has(self.collection.episodes.checkpoints) || "
        "(!has(self.policy.random) && self.policy.initialWeights == '')",
        sentence="checkpoints are weights for policy.entrypoint in place of policy.initialWeights; set the "
        "entrypoint and remove initialWeights",
        path=("collection", "episodes"),
    ),
    Rule(
        # CEL has no powers
        holds=lambda spec: _num_pairings(spec) <= MAX_CHECKPOINTS,
        sentence="checkpoints make {pairings} pairings for the {groups} groups of policy.agents, and at most "
        f"{MAX_CHECKPOINTS} are played; list fewer checkpoints",
        values={"pairings": _num_pairings, "groups": lambda spec: len(spec.policy.playing)},
        path=("collection", "episodes"),
    ),
    # -- policies of groups of agents
    Rule(
        cel="!has(self.policy.agents) || ((has(self.env.pettingzoo) || has(self.env.envpool)) && "
        f"!self.workerGroups.exists(g, {_SERVERS}) && !has(self.collection.normalize))",
        sentence="agents need env.pettingzoo or env.envpool, and no collection.normalize or "
        "groups with role inference; remove those, or use policy.entrypoint",
        path=("policy", "agents"),
    ),
    # -- learners
    Rule(
        cel="has(self.output.queue) || (!has(self.collection.multiStep) && !self.collection.splitTrajectories && "
        "!has(self.collection.bfloat16))",
        sentence="multiStep, splitTrajectories and bfloat16 need output.queue: they apply to learners, and a dataset "
        "has frames as they were collected; add output.queue or remove them",
        path=("collection",),
    ),
    # -- worker groups
    each_once(
        "workerGroups", "the name {twice} occurs twice in workerGroups; give each group a name of its own", key="name"
    ),
    Rule(
        cel=f"self.elasticGroup == '' || !({_NO_ELASTIC})",
        sentence="elasticGroup {name} is not a worker group; use one of {names}, or remove it for the first group",
        values=_GROUPS,
        path=("elasticGroup",),
    ),
    Rule(
        cel=f"self.workerGroups.all(g, g.name != {_ELASTIC} || !has(g.replicas))",
        sentence="replicas of the elastic group {name} must not be set, because spec.replicas {self.replicas} sizes "
        "it; remove it from the group and set spec.replicas",
        values=_GROUPS,
        path=("workerGroups",),
    ),
    Rule(
        cel="has(self.output.queue) || !self.workerGroups.exists(g, has(g.autoscale))",
        sentence="autoscale of group {group} needs output.queue: without learners nothing says how many workers are "
        "needed; add output.queue: {} or remove autoscale",
        values={"group": "self.workerGroups.filter(g, has(g.autoscale))[0].name"},
        path=("workerGroups",),
    ),
    Rule(
        cel=f"{_NO_ELASTIC} || self.workerGroups.all(g, g.name == {_ELASTIC} || has(g.replicas))",
        sentence="replicas is missing in group {group}: spec.replicas sizes only the elastic group {name}; "
        "set replicas in the group",
        values=_GROUPS | {"group": f"self.workerGroups.filter(g, g.name != {_ELASTIC} && !has(g.replicas))[0].name"},
        path=("workerGroups",),
    ),
    Rule(
        cel=f"{_NO_ELASTIC} || self.workerGroups.all(g, g.name == {_ELASTIC} || "
        "(!has(g.minReplicas) && !has(g.maxReplicas)))",
        sentence="minReplicas and maxReplicas must not be set in group {group}, because {name} is the elastic group; "
        "remove them, or name the group in elasticGroup",
        values=_GROUPS
        | {
            "group": f"self.workerGroups.filter(g, g.name != {_ELASTIC} && "
            "(has(g.minReplicas) || has(g.maxReplicas)))[0].name"
        },
        path=("workerGroups",),
    ),
    Rule(
        cel=f"self.workerGroups.all(g, g.name != {_ELASTIC} || ({_LOW} <= self.replicas && self.replicas <= {_HIGH}))",
        sentence="replicas {self.replicas} is not from {low} to {high}, the minReplicas and maxReplicas of the elastic "
        "group {name}; change one of them",
        values={
            "name": _ELASTIC,
            "low": f"self.workerGroups.filter(g, g.name == {_ELASTIC}).map(g, {_LOW})[0]",
            "high": f"self.workerGroups.filter(g, g.name == {_ELASTIC}).map(g, {_HIGH})[0]",
        },
        path=("replicas",),
    ),
    # -- inference servers
    Rule(
        cel=f"!has(self.inference) || self.workerGroups.exists(g, {_SERVERS})",
        sentence="inference is for groups with role inference, and no group of {names} has it; set role: inference in "
        "a group, or remove inference",
        values=_GROUPS,
        path=("inference",),
    ),
    Rule(
        cel=f"!self.workerGroups.all(g, {_SERVERS})",
        sentence="all groups {names} have role inference and no group collects; add a group with role collect",
        values=_GROUPS,
        path=("workerGroups",),
    ),
    Rule(
        cel=f"!has(self.policy.random) || !self.workerGroups.exists(g, {_SERVERS})",
        sentence="random actions need no inference servers; remove the groups with role inference, or name a policy in "
        "policy.entrypoint",
        path=("workerGroups",),
    ),
    Rule(
        # Where all groups serve, the first rule says so.
        cel=f"self.workerGroups.all(g, {_SERVERS}) || !self.workerGroups.exists(g, g.name == {_ELASTIC} && {_SERVERS})",
        sentence="spec.replicas sizes group {name}, which has role inference; name a group that collects in "
        "elasticGroup, and set replicas in group {name}",
        values=_GROUPS,
        path=("elasticGroup",),
    ),
    Rule(
        cel=f"!self.workerGroups.exists(g, {_SERVERS}) || "
        f"self.workerGroups.exists(g, {_SERVERS} && (!has(g.replicas) || g.replicas > 0))",
        sentence="all groups with role inference have 0 replicas, and workers cannot act without servers; set replicas "
        "to at least 1, or pause the job",
        path=("workerGroups",),
    ),
    # -- single fields
    Rule(
        cel="!self.collection.resetAtEachBatch || !has(self.env.envpool) || "
        "self.env.envpool.batchSize in [0, self.env.envpool.numEnvs]",
        sentence="resetAtEachBatch needs envpool.batchSize 0: environments with steps in flight cannot be reset",
        path=("collection", "resetAtEachBatch"),
    ),
    Rule(
        cel="has(self.managedBy) == has(oldSelf.managedBy) && "
        "(!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
        sentence="managedBy is immutable because two controllers must not manage one job; create a new job",
        path=("managedBy",),
    ),
)


class CollectorJobSpec(Contract):
    """Desired state: what to collect, and with which pods."""

    env: Env
    """The environment: exactly one block of `spec.env`. Immutable."""

    policy: Policy
    """The policy: exactly one of random, entrypoint and agents."""

    code: Code | None = None
    """User code for environments and policies. Unset means that the image contains it."""

    collection: Collection
    output: Output = Output(queue=QueueOutput())
    """Where batches go."""

    image: Text = ""
    """Image of head and workers. Empty means the operator's default."""

    head: Head = Head()
    """The head pod."""

    worker_groups: WorkerGroups = (WorkerGroup(name="cpu"),)
    """Groups of worker pods, by name."""

    inference: Inference | None = None
    """How the servers of groups with role inference gather rows; only with such a group. Unset means the defaults."""

    elastic_group: Annotated[str, Field(strict=True, max_length=10, pattern=OPTIONAL_LABEL_PATTERN)] = ""
    """Worker group scaled by spec.replicas. Empty means the first group."""

    replicas: Replicas = 1
    """Number of workers in the elastic group; written by `kubectl scale` and autoscalers."""

    suspend: Flag = False
    """true deletes the pods and keeps the job; false resumes it."""

    paused: Flag = False
    """true keeps the pods and pauses all workers; false resumes them."""

    run_policy: RunPolicy = RunPolicy()
    managed_by: Annotated[str, Field(strict=True, max_length=63, pattern=CONTROLLER_PATTERN)] | None = None
    """Controller that manages the job. Unset means cormorant.dev/operator, which ignores jobs of others. Immutable."""

    @property
    def target(self) -> int | None:
        """Target count of the job: frames, or an evaluation's episodes. None: no limit."""
        if self.collection.episodes is None:
            return self.collection.total_frames
        return self.collection.episodes.num_planned(len(self.env.variants or ()), len(self.policy.playing))

    @property
    def counts(self) -> Literal["frames", "episodes"]:
        """Unit of the target."""
        return "frames" if self.collection.episodes is None else "episodes"

    @property
    def elastic(self) -> WorkerGroup:
        """The group that spec.replicas sizes: the named one, else the first."""
        return next(group for group in self.worker_groups if group.name == (self.elastic_group or group.name))

    @property
    def is_of_others(self) -> bool:
        """Whether another controller manages the job."""
        return self.managed_by not in (None, CONTROLLER)

    def size_of(self, group: WorkerGroup) -> int:
        """Workers that a group of this spec should have."""
        return group.replicas if group.replicas is not None else self.replicas

    @property
    def is_served(self) -> bool:
        """Whether inference servers call the policy."""
        return any(group.serves for group in self.worker_groups)

    rules = _RULES
