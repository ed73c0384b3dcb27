"""`spec`: what to collect, with which pods, and the rules between its parts."""

import json
from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import CONTROLLER_PATTERN, OPTIONAL_LABEL_PATTERN, Contract, Flag, Text, keyed_by
from cormorant_contract.collection import Collection
from cormorant_contract.env import KINDS, Env
from cormorant_contract.episodes import MAX_CHECKPOINTS
from cormorant_contract.output import Output, QueueOutput
from cormorant_contract.policy import Code, Policy
from cormorant_contract.rule import Rule, Value
from cormorant_contract.run_policy import RunPolicy
from cormorant_contract.variants import seats_of
from cormorant_contract.workers import Head, Inference, Replicas, WorkerGroup

CONTROLLER = "cormorant.dev/operator"
"""`managedBy` of jobs that the operator manages."""
MAX_WORKER_GROUPS = 8
WorkerGroups = Annotated[
    tuple[WorkerGroup, ...], Field(min_length=1, max_length=MAX_WORKER_GROUPS, json_schema_extra=keyed_by("name"))
]


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
        """What the target counts."""
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

    @classmethod
    def rules(cls) -> "tuple[Rule[CollectorJobSpec], ...]":
        return _RULES


_NUM_ENVS = f"({''.join(f'has(self.env.{kind}) ? self.env.{kind}.numEnvs : ' for kind in KINDS)}1)"
_UNDECLARED = "!has(self.env.info) || !self.env.info.exists(i, i.key == m.key)"


def _undeclared(spec: CollectorJobSpec) -> list[str]:
    return [metric.name for metric in spec.collection.episode_metrics or () if metric.key not in spec.env.info_keys]


def _shaped(spec: CollectorJobSpec) -> list[str]:
    shaped = {item.key for item in spec.env.info or () if item.shape}
    return [metric.name for metric in spec.collection.episode_metrics or () if metric.key in shaped]


_ELASTIC = "(self.elasticGroup == '' ? self.workerGroups[0].name : self.elasticGroup)"
_NO_ELASTIC = f"!self.workerGroups.exists(g, g.name == {_ELASTIC})"


def _num_pairings(spec: CollectorJobSpec) -> int:
    episodes = spec.collection.episodes
    return 0 if episodes is None else episodes.num_pairings(len(spec.policy.playing))


def _elastic(spec: CollectorJobSpec) -> list[WorkerGroup]:
    """The elastic group alone; empty where elasticGroup names none, which has a rule of its own."""
    name = spec.elastic_group or spec.worker_groups[0].name
    return [group for group in spec.worker_groups if group.name == name]


def _fixed(spec: CollectorJobSpec) -> list[WorkerGroup]:
    elastic = _elastic(spec)
    return [group for group in spec.worker_groups if elastic and group.name != elastic[0].name]


def _has_bounds(group: WorkerGroup) -> bool:
    return group.min_replicas is not None or group.max_replicas is not None


_ELASTIC_NAME: Value[CollectorJobSpec] = Value(
    cel=_ELASTIC, get=lambda spec: spec.elastic_group or spec.worker_groups[0].name
)
_GROUP_NAMES: Value[CollectorJobSpec] = Value(
    # The list itself: the API server's cost estimate takes join() for a string without end.
    cel="self.workerGroups.map(g, g.name)",
    get=lambda spec: json.dumps([group.name for group in spec.worker_groups]),
)
_SERVERS = "(has(g.role) && g.role == 'inference')"
"""CEL: group g has role inference."""

_RULES: tuple[Rule[CollectorJobSpec], ...] = (
    # -- batches and metrics
    Rule(
        cel=f"self.collection.framesPerBatch % {_NUM_ENVS} == 0",  # an env of no or several kinds has its own rule
        holds=lambda spec: spec.collection.frames_per_batch % spec.env.num_envs == 0,
        sentence="framesPerBatch {self.collection.framesPerBatch} is not a multiple of numEnvs {envs}; write a "
        "multiple of it, for example {example}",
        values={
            "envs": Value(cel=_NUM_ENVS, get=lambda spec: spec.env.num_envs),
            "example": Value(
                cel=f"[{_NUM_ENVS}].map(n, (self.collection.framesPerBatch / n + 1) * n)[0]",
                get=lambda spec: (spec.collection.frames_per_batch // spec.env.num_envs + 1) * spec.env.num_envs,
            ),
        },
        path=("collection", "framesPerBatch"),
    ),
    Rule(
        cel=f"!has(self.collection.episodeMetrics) || !self.collection.episodeMetrics.exists(m, {_UNDECLARED})",
        holds=lambda spec: not _undeclared(spec),
        sentence="the metric {name} reads a key that env.info does not declare; add the key to env.info, "
        "which has {keys}, or remove the metric",
        values={
            "name": Value(
                cel=f"self.collection.episodeMetrics.filter(m, {_UNDECLARED})[0].name",
                get=lambda spec: _undeclared(spec)[0],
            ),
            "keys": Value(
                cel="(has(self.env.info) ? self.env.info.map(i, i.key) : [])",
                get=lambda spec: json.dumps(spec.env.info_keys),
            ),
        },
        path=("collection", "episodeMetrics"),
    ),
    Rule(
        cel="!has(self.collection.episodeMetrics) || !has(self.env.info) || !self.collection.episodeMetrics.exists(m, "
        "self.env.info.exists(i, i.key == m.key && has(i.shape) && i.shape.size() > 0))",
        holds=lambda spec: not _shaped(spec),
        sentence="the metric {name} reads a key with a shape; a metric is made of single numbers: use another key",
        values={
            "name": Value(
                cel="self.collection.episodeMetrics.filter(m, self.env.info.exists(i, i.key == m.key && "
                "has(i.shape) && i.shape.size() > 0))[0].name",
                get=lambda spec: _shaped(spec)[0],
            )
        },
        path=("collection", "episodeMetrics"),
    ),
    # -- evaluations
    Rule(
        cel="!has(self.collection.episodes) || (has(self.output.dataset) && !has(self.output.queue))",
        holds=lambda spec: (
            spec.collection.episodes is None or (spec.output.dataset is not None and spec.output.queue is None)
        ),
        sentence="collection.episodes needs a folder for its results and delivers no batches; set "
        "output.dataset.uri and remove output.queue",
        path=("output",),
    ),
    Rule(
        cel="!has(self.collection.episodes) || !self.workerGroups.exists(g, has(g.role) && g.role == 'inference')",
        holds=lambda spec: spec.collection.episodes is None or not spec.is_served,
        sentence="an evaluation asks the policy for one row at a time, in the workers; remove the groups with role "
        "inference",
        path=("workerGroups",),
    ),
    Rule(
        cel="!has(self.collection.episodes) || !has(self.collection.episodes.resetOptions) || "
        "(!has(self.env.envpool) && !has(self.env.jax))",
        holds=lambda spec: (
            spec.collection.episodes is None
            or spec.collection.episodes.reset_options is None
            or (spec.env.envpool is None and spec.env.jax is None)
        ),
        sentence="resetOptions need a gymnasium environment: EnvPool's and JAX's take no options at a reset; use seeds",
        path=("collection", "episodes"),
    ),
    Rule(
        cel="!has(self.collection.episodes) || self.collection.episodes.perTask || has(self.env.variants)",
        holds=lambda spec: (
            spec.collection.episodes is None or spec.collection.episodes.per_task or bool(spec.env.variants)
        ),
        sentence="perTask: false shares the episodes among env.variants, and there are none; remove perTask, or "
        "add variants",
        path=("collection", "episodes"),
    ),
    Rule(
        cel="!has(self.collection.episodes) || !has(self.collection.episodes.checkpoints) || "
        "(!has(self.policy.random) && self.policy.initialWeights == '')",
        holds=lambda spec: (
            spec.collection.episodes is None
            or spec.collection.episodes.checkpoints is None
            or (spec.policy.random is None and not spec.policy.initial_weights)
        ),
        sentence="checkpoints are weights for policy.entrypoint in place of policy.initialWeights; set the "
        "entrypoint and remove initialWeights",
        path=("collection", "episodes"),
    ),
    Rule(
        cel="",  # CEL has no powers
        holds=lambda spec: _num_pairings(spec) <= MAX_CHECKPOINTS,
        sentence="checkpoints make {pairings} pairings for the {groups} groups of policy.agents, and at most "
        f"{MAX_CHECKPOINTS} are played; list fewer checkpoints",
        values={
            "pairings": Value(get=_num_pairings),
            "groups": Value(get=lambda spec: len(spec.policy.playing)),
        },
        path=("collection", "episodes"),
    ),
    # -- policies of groups of agents
    Rule(
        cel="!has(self.policy.agents) || ((has(self.env.pettingzoo) || has(self.env.envpool)) && "
        f"!self.workerGroups.exists(g, {_SERVERS}) && !has(self.collection.normalize))",
        holds=lambda spec: (
            spec.policy.agents is None
            or (
                spec.env.block.kind in ("pettingzoo", "envpool")
                and not spec.is_served
                and spec.collection.normalize is None
            )
        ),
        sentence="agents need env.pettingzoo or env.envpool, and no collection.normalize or "
        "groups with role inference; remove those, or use policy.entrypoint",
        path=("policy", "agents"),
    ),
    # -- learners
    Rule(
        cel="has(self.output.queue) || (!has(self.collection.multiStep) && !self.collection.splitTrajectories)",
        holds=lambda spec: (
            spec.output.queue is not None
            or (spec.collection.multi_step is None and not spec.collection.split_trajectories)
        ),
        sentence="multiStep and splitTrajectories need output.queue: they apply to learners, and a dataset has frames "
        "as they were collected; add output.queue or remove them",
        path=("collection",),
    ),
    # -- worker groups
    Rule(
        cel="",  # the list is keyed by name: the API server refuses a second item itself
        holds=lambda spec: len({group.name for group in spec.worker_groups}) == len(spec.worker_groups),
        sentence="the names {names} are not unique; give each group a different name",
        values={"names": _GROUP_NAMES},
        path=("workerGroups",),
    ),
    Rule(
        cel=f"self.elasticGroup == '' || !({_NO_ELASTIC})",
        holds=lambda spec: bool(_elastic(spec)),
        sentence="elasticGroup {name} is not a worker group; use one of {names}, or remove it for the first group",
        values={"name": _ELASTIC_NAME, "names": _GROUP_NAMES},
        path=("elasticGroup",),
    ),
    Rule(
        cel=f"self.workerGroups.all(g, g.name != {_ELASTIC} || !has(g.replicas))",
        holds=lambda spec: all(group.replicas is None for group in _elastic(spec)),
        sentence="replicas of the elastic group {name} must not be set, because spec.replicas {self.replicas} sizes "
        "it; remove it from the group and set spec.replicas",
        values={"name": _ELASTIC_NAME},
        path=("workerGroups",),
    ),
    Rule(
        cel="has(self.output.queue) || !self.workerGroups.exists(g, has(g.autoscale))",
        holds=lambda spec: (
            spec.output.queue is not None or all(group.autoscale is None for group in spec.worker_groups)
        ),
        sentence="autoscale of group {group} needs output.queue: without learners nothing says how many workers are "
        "needed; add output.queue: {} or remove autoscale",
        values={
            "group": Value(
                cel="self.workerGroups.filter(g, has(g.autoscale))[0].name",
                get=lambda spec: next(group.name for group in spec.worker_groups if group.autoscale is not None),
            ),
        },
        path=("workerGroups",),
    ),
    Rule(
        cel=f"{_NO_ELASTIC} || self.workerGroups.all(g, g.name == {_ELASTIC} || has(g.replicas))",
        holds=lambda spec: all(group.replicas is not None for group in _fixed(spec)),
        sentence="replicas is missing in group {group}: spec.replicas sizes only the elastic group {name}; "
        "set replicas in the group",
        values={
            "group": Value(
                cel=f"self.workerGroups.filter(g, g.name != {_ELASTIC} && !has(g.replicas))[0].name",
                get=lambda spec: next(group.name for group in _fixed(spec) if group.replicas is None),
            ),
            "name": _ELASTIC_NAME,
        },
        path=("workerGroups",),
    ),
    Rule(
        cel=f"{_NO_ELASTIC} || self.workerGroups.all(g, g.name == {_ELASTIC} || "
        "(!has(g.minReplicas) && !has(g.maxReplicas)))",
        holds=lambda spec: not any(_has_bounds(group) for group in _fixed(spec)),
        sentence="minReplicas and maxReplicas must not be set in group {group}, because {name} is the elastic group; "
        "remove them, or name the group in elasticGroup",
        values={
            "group": Value(
                cel=f"self.workerGroups.filter(g, g.name != {_ELASTIC} && (has(g.minReplicas) || has(g.maxReplicas)))"
                "[0].name",
                get=lambda spec: next(group.name for group in _fixed(spec) if _has_bounds(group)),
            ),
            "name": _ELASTIC_NAME,
        },
        path=("workerGroups",),
    ),
    Rule(
        cel=f"self.workerGroups.all(g, g.name != {_ELASTIC} || !has(g.minReplicas) || g.minReplicas <= self.replicas)",
        holds=lambda spec: all((group.min_replicas or 0) <= spec.replicas for group in _elastic(spec)),
        sentence="replicas {self.replicas} is less than minReplicas {bound} of the elastic group {name}; "
        "raise replicas or lower minReplicas",
        values={
            "bound": Value(
                cel=f"self.workerGroups.filter(g, g.name == {_ELASTIC})[0].minReplicas",
                get=lambda spec: spec.elastic.min_replicas,
            ),
            "name": _ELASTIC_NAME,
        },
        path=("replicas",),
    ),
    Rule(
        cel=f"self.workerGroups.all(g, g.name != {_ELASTIC} || !has(g.maxReplicas) || self.replicas <= g.maxReplicas)",
        holds=lambda spec: all(
            group.max_replicas is None or spec.replicas <= group.max_replicas for group in _elastic(spec)
        ),
        sentence="replicas {self.replicas} is greater than maxReplicas {bound} of the elastic group {name}; "
        "lower replicas or raise maxReplicas",
        values={
            "bound": Value(
                cel=f"self.workerGroups.filter(g, g.name == {_ELASTIC})[0].maxReplicas",
                get=lambda spec: spec.elastic.max_replicas,
            ),
            "name": _ELASTIC_NAME,
        },
        path=("replicas",),
    ),
    # -- inference servers
    Rule(
        cel=f"!has(self.inference) || self.workerGroups.exists(g, {_SERVERS})",
        holds=lambda spec: spec.inference is None or spec.is_served,
        sentence="inference is for groups with role inference, and no group of {names} has it; set role: inference in "
        "a group, or remove inference",
        values={"names": _GROUP_NAMES},
        path=("inference",),
    ),
    Rule(
        cel=f"!self.workerGroups.all(g, {_SERVERS})",
        holds=lambda spec: not all(group.serves for group in spec.worker_groups),
        sentence="all groups {names} have role inference and no group collects; add a group with role collect",
        values={"names": _GROUP_NAMES},
        path=("workerGroups",),
    ),
    Rule(
        cel=f"!has(self.policy.random) || !self.workerGroups.exists(g, {_SERVERS})",
        holds=lambda spec: not spec.is_served or spec.policy.random is None,
        sentence="random actions need no inference servers; remove the groups with role inference, or name a policy in "
        "policy.entrypoint",
        path=("workerGroups",),
    ),
    Rule(
        # Where all groups serve, the first rule says so.
        cel=f"self.workerGroups.all(g, {_SERVERS}) || !self.workerGroups.exists(g, g.name == {_ELASTIC} && {_SERVERS})",
        holds=lambda spec: (
            all(group.serves for group in spec.worker_groups) or not any(group.serves for group in _elastic(spec))
        ),
        sentence="spec.replicas sizes group {name}, which has role inference; name a group that collects in "
        "elasticGroup, and set replicas in group {name}",
        values={"name": _ELASTIC_NAME},
        path=("elasticGroup",),
    ),
    Rule(
        cel=f"!self.workerGroups.exists(g, {_SERVERS}) || "
        f"self.workerGroups.exists(g, {_SERVERS} && (!has(g.replicas) || g.replicas > 0))",
        holds=lambda spec: (
            not spec.is_served or any(group.serves and group.replicas != 0 for group in spec.worker_groups)
        ),
        sentence="all groups with role inference have 0 replicas, and workers cannot act without servers; set replicas "
        "to at least 1, or pause the job",
        path=("workerGroups",),
    ),
    # -- single fields
    Rule(
        cel="has(self.output.queue) || !has(self.collection.bfloat16)",
        holds=lambda spec: spec.output.queue is not None or spec.collection.bfloat16 is None,
        sentence="bfloat16 needs output.queue: it applies to learners, and a dataset has float32; add output.queue or "
        "remove it",
        path=("collection", "bfloat16"),
    ),
    Rule(
        cel="!self.collection.resetAtEachBatch || !has(self.env.envpool) || "
        "self.env.envpool.batchSize in [0, self.env.envpool.numEnvs]",
        holds=lambda spec: (
            not spec.collection.reset_at_each_batch
            or (pool := spec.env.envpool) is None
            or pool.batch_size in (0, pool.num_envs)
        ),
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


def unplayed(spec: CollectorJobSpec) -> str:
    """Error message if even the largest fleet that the manifest allows has no environment for some variants; else
    empty.
    """
    variants, num_envs = spec.env.variants or (), spec.env.num_envs
    weight = sum(variant.weight for variant in variants)
    played, envs = set[int](), 0
    for number, group in enumerate(spec.worker_groups):
        size = spec.size_of(group) if group.replicas is not None else max(spec.replicas, group.max_replicas or 0)
        if not group.serves:
            envs += size * num_envs
            played.update(seats_of(variants, group_number=number, index=0, num_envs=min(weight, size * num_envs)))
    missing = [variant.name for task_id, variant in enumerate(variants) if task_id not in played]
    if not missing or not envs or spec.collection.episodes is not None:  # an evaluation plays the variants of its list
        return ""
    return (
        f"no environment plays the variants {', '.join(missing)}: the fleet has {envs} environments for "
        f"{len(variants)} variants; raise numEnvs or the number of workers, or change the weights"
    )
