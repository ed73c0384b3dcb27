"""CollectorJob: the one document a user writes, for a laptop and for Kubernetes alike."""

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from cormorant_contract.base import OPTIONAL_NAME_PATTERN, PATTERN_WORDS, SERVICE_NAME_PATTERN, Contract, Label
from cormorant_contract.children import PRIORITY_CLASS, QUEUE
from cormorant_contract.rule import Rule
from cormorant_contract.spec import CollectorJobSpec
from cormorant_contract.status import CollectorJobStatus

GROUP = "cormorant.dev"
VERSION = "v1alpha1"
API_VERSION = "cormorant.dev/v1alpha1"
KIND = "CollectorJob"

# Services carry the job's name and begin with a letter (DNS-1035); the longest pod name, <job>-<group>-<index>-<hash5>,
# fits 63 characters when the job's name has at most 40.
JobName = Annotated[str, Field(strict=True, max_length=40, pattern=SERVICE_NAME_PATTERN)]

_KUEUE = {QUEUE: "LocalQueue", PRIORITY_CLASS: "WorkloadPriorityClass"}
_OBJECT_NAME = re.compile(OPTIONAL_NAME_PATTERN)


def _names_an_object(label: str, kind: str) -> Rule:
    return Rule(
        # A CRD cannot validate labels.
        holds=lambda metadata: label not in metadata.labels or bool(_OBJECT_NAME.match(metadata.labels[label])),
        sentence=f"{{value}} is not the name of a {kind}; write {PATTERN_WORDS[OPTIONAL_NAME_PATTERN]}",
        values={"value": lambda metadata: metadata.labels[label]},
        path=("labels", label),
    )


class Metadata(Contract):
    """Kubernetes' metadata; keys that Cormorant does not read are kept as they are."""

    model_config = ConfigDict(extra="allow")

    name: JobName
    """Name of the job, unique in its namespace: lower-case letters, digits and dashes, at most 40 characters."""

    namespace: Label = "default"
    """Namespace of the job."""

    labels: dict[str, Annotated[str, Field(strict=True)]] = Field(default={})
    """Labels of the job."""

    annotations: dict[str, Annotated[str, Field(strict=True)]] = Field(default={})
    """Annotations of the job."""

    rules = tuple(_names_an_object(label, kind) for label, kind in _KUEUE.items())

    def to_document(self) -> dict[str, Any]:
        """Only the fields that were given: without a namespace, the client chooses one."""
        document = super().to_document()
        unwritten = type(self).model_fields.keys() - self.model_fields_set
        return {key: value for key, value in document.items() if key not in unwritten}


class CollectorJob(Contract):
    """A job: the environment, the policy, how many frames to collect, and the workers that collect them."""

    api_version: Literal["cormorant.dev/v1alpha1"] = "cormorant.dev/v1alpha1"
    """Version of this schema."""

    kind: Literal["CollectorJob"] = "CollectorJob"
    """Always CollectorJob."""

    metadata: Metadata
    """Name, namespace, labels."""

    spec: CollectorJobSpec
    status: CollectorJobStatus = CollectorJobStatus()
    """Observed state of the job, written by the operator."""

    def to_document(self) -> dict[str, Any]:
        """The job as a manifest's document, without an empty status."""
        document = super().to_document()
        if self.status == CollectorJobStatus():
            del document["status"]
        return document
