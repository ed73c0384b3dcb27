"""What two processes of Cormorant must agree on. Imports pydantic and the standard library only.

`CollectorJob` is the manifest as a value, `parse_job` makes it of a loaded document, `schema.crd` is its
CustomResourceDefinition.
"""

from cormorant_contract.errors import ContractError, ManifestError, Problem
from cormorant_contract.job import API_VERSION, KIND, CollectorJob, Metadata
from cormorant_contract.spec import CollectorJobSpec

__all__ = [
    "API_VERSION",
    "KIND",
    "CollectorJob",
    "CollectorJobSpec",
    "ContractError",
    "ManifestError",
    "Metadata",
    "Problem",
]
