"""CollectorJob: the one document a user writes, for a laptop and for Kubernetes alike."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from cormorant_contract.base import SERVICE_NAME_PATTERN, Contract, Label
from cormorant_contract.spec import CollectorJobSpec
from cormorant_contract.status import CollectorJobStatus

GROUP = "cormorant.dev"
VERSION = "v1alpha1"
API_VERSION = "cormorant.dev/v1alpha1"
KIND = "CollectorJob"

# Services carry the job's name and begin with a letter (DNS-1035); the longest pod name, <job>-<group>-<index>-<hash5>,
# fits 63 characters when the job's name has at most 40.
JobName = Annotated[str, Field(strict=True, max_length=40, pattern=SERVICE_NAME_PATTERN)]


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
