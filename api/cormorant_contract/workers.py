"""`spec.head` and `spec.workerGroups`: the pods of a job."""

from typing import Annotated, Literal

from pydantic import Field

from cormorant_contract.base import LABEL_PATTERN, OPTIONAL_NAME_PATTERN, Contract, JsonObject, Whole
from cormorant_contract.rule import Rule, one_of

MAX_REPLICAS = 9999
"""A worker's index has at most four digits, so that pod names fit 63 characters."""

Replicas = Annotated[Whole, Field(ge=0, le=MAX_REPLICAS)]
BoundReplicas = Annotated[Whole, Field(ge=1, le=MAX_REPLICAS)]
GroupName = Annotated[str, Field(strict=True, max_length=10, pattern=LABEL_PATTERN)]
BatchShape = Annotated[Whole, Field(ge=1, le=65536, description="A number of environments.")]
ObjectName = Annotated[str, Field(strict=True, min_length=1, max_length=253, pattern=OPTIONAL_NAME_PATTERN)]
ClaimName = Annotated[str, Field(strict=True, max_length=253, pattern=OPTIONAL_NAME_PATTERN)]


class Persistence(Contract):
    """A volume that holds the head's state."""

    claim_name: ClaimName = ""
    """PersistentVolumeClaim in the job's namespace. Empty means none: a new head continues from the job's status."""


class IssuerRef(Contract):
    """The issuer of cert-manager that signs a head's certificate."""

    name: ObjectName
    """Name of the issuer."""

    kind: Annotated[str, Field(strict=True, min_length=1, max_length=63)] = "Issuer"
    """Issuer, of the job's namespace, or ClusterIssuer."""

    group: Annotated[str, Field(strict=True, min_length=1, max_length=253)] = "cert-manager.io"
    """API group of the issuer."""


class CertManager(Contract):
    """A certificate that cert-manager makes for the head, and renews."""

    issuer_ref: IssuerRef
    """The issuer that signs it."""


class HeadTls(Contract):
    """The head's certificate: exactly one of secretName and certManager. The head then serves only HTTPS."""

    secret_name: ObjectName | None = None
    """Secret of the job's namespace with tls.crt and tls.key, and ca.crt for the command line. The certificate names
    JOB-api.NAMESPACE.svc."""

    cert_manager: CertManager | None = None
    """Have the operator ask cert-manager for one, into the Secret JOB-tls."""

    rules = (one_of("secretName", "certManager", remedy="write one of the two"),)


class Head(Contract):
    """The head pod: Ray head and control plane."""

    resources: JsonObject = Field(default={})
    """Resource requests and limits of the head's container, as in a pod."""

    template: JsonObject = Field(default={})
    """Pod template merged over the generated one, lists by name. The API server checks the result with a dry run."""

    persistence: Persistence = Persistence()
    tls: HeadTls | None = None
    """HTTPS on both ports of the head. Unset means HTTP."""


class Inference(Contract):
    """How inference servers gather rows; the defaults follow from the measured time of one policy call."""

    max_batch: Annotated[Whole, Field(ge=0, le=65536)] = 0
    """Maximum number of environments in one call of the policy. 0 means all that wait."""

    max_wait_ms: Annotated[float, Field(strict=True, ge=0, le=60_000, allow_inf_nan=False)] | None = None
    """Longest time that a row waits for others, in milliseconds. Unset means a quarter of the time of
    a call, at most 20."""

    batch_shapes: Annotated[tuple[BatchShape, ...], Field(max_length=32)] = ()
    """Batch sizes to which calls of the policy are padded. Empty means powers of two on a gpu, and no padding on
    a cpu."""


def _min_and_max(cel: str) -> Rule:
    return Rule(
        cel=cel,
        sentence="minReplicas {self.minReplicas} is greater than maxReplicas {self.maxReplicas}; lower one or "
        "raise the other",
        path=("minReplicas",),
    )


class Autoscale(Contract):
    """Resizes a group depending on whether learners or workers are idle. On Kubernetes only."""

    min_replicas: BoundReplicas = 1
    """Fewest workers."""

    max_replicas: BoundReplicas
    """Most workers."""

    by: Literal["learner-wait"] = "learner-wait"
    """Adds workers while learners wait for batches, and removes workers that are idle."""

    rules = (_min_and_max("self.minReplicas <= self.maxReplicas"),)


class WorkerGroup(Contract):
    """Worker pods made from one template."""

    name: GroupName
    """Name of the group, unique in the job. Part of pod names, so at most 10 characters."""

    role: Literal["collect", "inference"] | None = None
    """collect: workers step environments. inference: servers act for the environments of all other groups. Unset means
    collect."""

    device: Literal["cpu", "gpu"] = "cpu"
    """Device of the policy. A gpu worker that finds no device exits with an error."""

    replicas: Replicas | None = None
    """Number of workers. Required in every group except the elastic one, which spec.replicas sizes."""

    min_replicas: Replicas | None = None
    """Lower bound of spec.replicas; only in the elastic group. Unset means no bound."""

    max_replicas: Replicas | None = None
    """Upper bound of spec.replicas; only in the elastic group. Unset means no bound."""

    autoscale: Autoscale | None = None
    """The operator sizes the group; replicas is its first size. Needs output.queue. Unset means a fixed size."""

    resources: JsonObject = Field(default={})
    """Resource requests and limits of the worker's container, as in a pod."""

    template: JsonObject = Field(default={})
    """Pod template merged over the generated one, lists by name. The API server checks the result with a dry run."""

    @property
    def serves(self) -> bool:
        """Whether its workers are inference servers."""
        return self.role == "inference"

    rules = (
        _min_and_max("!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas"),
        Rule(
            cel="!has(self.autoscale) || !has(self.role) || self.role != 'inference'",
            sentence="autoscale adds workers that step environments, and group {self.name} has role inference; "
            "remove autoscale and set replicas",
            path=("autoscale",),
        ),
    )
