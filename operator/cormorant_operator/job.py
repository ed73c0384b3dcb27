"""A CollectorJob as read from the API server: identity, spec and status; and digests of what its pods are made from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from pydantic import ValidationError

from cormorant_contract.children import HEAD, PRIORITY_CLASS, QUEUE, WORKER
from cormorant_contract.errors import ManifestError
from cormorant_contract.parsing import parse_job, prune
from cormorant_contract.schema import structural_schema
from cormorant_contract.spec import CollectorJobSpec
from cormorant_contract.status import CollectorJobStatus, Condition, ConditionType
from cormorant_contract.workers import WorkerGroup
from cormorant_operator import names

_DERIVED = {"phase", "conditions", "recentFailures", "groups", "elastic", "workers"}
"""Parts of a status that the next reconcile recomputes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a job and its version."""

    name: str
    namespace: str
    uid: str
    generation: int = 1
    """Grows with every change of the spec."""
    resource_version: str = ""
    is_deleting: bool = False
    queue: str = ""
    """Kueue's queue, from the job's label; empty: Kueue does not manage it."""
    priority_class: str = ""
    """Kueue's priority class of the job; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Identity):
    templates: "Templates"
    status: CollectorJobStatus
    unknown: tuple[str, ...] = ()
    """Fields of the spec that this operator does not know; they come from a newer schema."""

    @property
    def spec(self) -> CollectorJobSpec:
        return self.templates.spec

    @property
    def is_over(self) -> bool:
        """Whether the status says Completed or Failed. This is final."""
        return is_true(self.status, "Completed") or is_true(self.status, "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable(Identity):
    """A job that this operator cannot parse. The operator writes only its condition Accepted."""

    status: CollectorJobStatus | None
    """None: the status cannot be parsed, and is left alone."""
    message: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A condition without times."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""


def find(status: CollectorJobStatus, kind: ConditionType) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)


def is_true(status: CollectorJobStatus, kind: ConditionType) -> bool:
    condition = find(status, kind)
    return condition is not None and condition.status == "True"


def since(status: CollectorJobStatus, kind: ConditionType, value: str) -> datetime | None:
    """When the condition took this value; None if it has another value."""
    condition = find(status, kind)
    return condition.last_transition_time if condition is not None and condition.status == value else None


def read_job(document: Mapping[str, Any], *, before: Job | Unreadable | None = None) -> Job | Unreadable:
    """Parse an object. `before`: the job as last parsed; its spec is reused if the generation is the same."""
    metadata = document["metadata"]
    labels = metadata.get("labels") or {}
    identity: dict[str, Any] = {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "uid": metadata["uid"],
        "generation": metadata.get("generation", 1),
        "resource_version": metadata.get("resourceVersion", ""),
        "is_deleting": metadata.get("deletionTimestamp") is not None,
        "queue": labels.get(QUEUE, ""),
        "priority_class": labels.get(PRIORITY_CLASS, ""),
    }
    try:
        status = _read_status(document.get("status") or {})
    except ValidationError as error:
        # Without its status a completed job would start again, so do nothing.
        return Unreadable(**identity, status=None, message=f"cannot parse the status: {error}")
    if isinstance(before, Job) and before.generation == identity["generation"]:
        return replace(before, **identity, status=status)
    unknown: list[str] = []
    bare = {
        "apiVersion": document.get("apiVersion"),
        "kind": document.get("kind"),
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "spec": prune(document.get("spec"), structural_schema()["properties"]["spec"], path="spec", unknown=unknown),
    }
    try:
        spec = parse_job(bare).spec
    except ManifestError as error:
        return Unreadable(**identity, status=status, message=str(error))
    return Job(**identity, templates=Templates(spec), status=status, unknown=tuple(unknown))


def _read_status(document: Mapping[str, Any]) -> CollectorJobStatus:
    """Parse a status that another version of the operator may have written. Unreadable parts are dropped, unless they
    must never decrease, or say that the job has ended: then the job is left alone.
    """
    known = structural_schema()["properties"]["status"]
    readable: dict[str, Any] = prune(document, known, unknown=[])
    try:
        return _validate(readable)
    except ValidationError as error:
        broken = {tuple(details["loc"][:2]) for details in error.errors(include_url=False)}
        for name in _DERIVED & {place[0] for place in broken}:
            value = readable.pop(name)
            if isinstance(value, list):
                dropped = [item for index, item in enumerate(value) if (name, index) in broken]
                if any(isinstance(item, Mapping) and item.get("type") in ("Completed", "Failed") for item in dropped):
                    raise
                readable[name] = [item for index, item in enumerate(value) if (name, index) not in broken]
    return _validate(readable)


def _validate(document: Mapping[str, Any]) -> CollectorJobStatus:
    return CollectorJobStatus.model_validate(document, by_alias=True, by_name=False)


# -- digests ---------------------------------------------------------------------------------------------------

_LIVE_FIELDS = ("suspend", "paused", "replicas", "elasticGroup", "runPolicy", "image", "code", "head")
"""Parts of the spec that do not require a new head, or that its own template covers."""
_LIVE_GROUP_FIELDS = ("replicas", "minReplicas", "maxReplicas", "resources", "template")
_PLACED = ("nodeSelector", "affinity", "tolerations", "priorityClassName", "runtimeClassName", "overhead")


@dataclass(frozen=True)
class Templates:
    """A spec and its digests, each computed once: a pod with another digest than the current one is outdated.

    A digest covers the user's input, not the rendered pod or the API server's answer, so that an upgrade of the
    operator alone replaces no pods.
    """

    spec: CollectorJobSpec

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """The spec as in a manifest. Do not change it."""
        return self.spec.to_document()

    @cached_property
    def text(self) -> str:
        # JSON is valid YAML, and has a canonical form.
        return json.dumps(self.document, sort_keys=True, indent=1)

    @cached_property
    def config(self) -> str:
        """Digest of the part of the spec that a head reads at its start."""
        document = {key: value for key, value in self.document.items() if key not in _LIVE_FIELDS}
        document["workerGroups"] = [
            {key: value for key, value in group.items() if key not in _LIVE_GROUP_FIELDS}
            for group in document["workerGroups"]
        ]
        return names.digest(document)

    @cached_property
    def head(self) -> str:
        spec = self.spec
        return names.digest(HEAD, spec.image, self._code, spec.head.to_document(), self.config)

    @cached_property
    def quota(self) -> str:
        """Digest of everything that Kueue counts and places by, except numbers of pods."""
        spec = self.spec
        head = (spec.head.resources, _placed(spec.head.template))
        groups = [(group.name, group.device, group.resources, _placed(group.template)) for group in spec.worker_groups]
        return names.digest(head, groups)

    def worker(self, group: WorkerGroup) -> str:
        return self._workers[group.name]

    @cached_property
    def _workers(self) -> Mapping[str, str]:
        dataset = self.spec.output.dataset
        secret = (dataset.secret,) if dataset is not None and dataset.secret else ()
        common = (WORKER, self.spec.image, self._code, *secret)
        return {
            group.name: names.digest(*common, group.device, group.resources, group.template)
            for group in self.spec.worker_groups
        }

    @property
    def _code(self) -> str:
        code = self.spec.code
        return "" if code is None else code.config_map or f"image {code.image}"


def _placed(template: Mapping[str, Any]) -> Any:
    """The parts of a pod template that determine its resources and placement. The template may be invalid."""
    spec = template.get("spec")
    if not isinstance(spec, Mapping):
        return None
    containers = [
        (item.get("name"), item.get("resources"))
        for key in ("containers", "initContainers")
        if isinstance(spec.get(key), list)
        for item in spec[key]
        if isinstance(item, Mapping)
    ]
    return [spec.get(key) for key in ("resources", *_PLACED)], containers
