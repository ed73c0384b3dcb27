"""`/v1/models`: what can be published, and what was."""

from cormorant_contract.rest.base import Answer, Count, Request, Time, Version


class TensorShape(Answer):
    """One tensor that weights must have."""

    name: str
    dtype: str
    """The safetensors name, e.g. "F32"."""
    shape: tuple[int, ...]


class ModelSummary(Answer):
    """One named model of the policy."""

    name: str
    version: Version
    """Newest published version that holds this model; 0: it acts as it was built."""
    digest: str = ""
    """`xxh3:` and 32 hex digits of the published file; empty while nothing was published."""
    etag: str = ""
    bytes: Count = 0
    """Size of the published file."""
    num_tensors: Count


class Model(ModelSummary):
    """One named model, in full."""

    tensors: tuple[TensorShape, ...]
    workers_by_version: dict[str, Count]
    """How many workers act with each policy version; keys are decimal numbers."""


class Models(Answer):
    """Every named model."""

    models: tuple[ModelSummary, ...]
    version: Version
    """The job's newest published version, whatever the model."""


class VersionEntry(Answer):
    """One retained version of a model."""

    version: Version
    digest: str
    etag: str
    bytes: Count
    published_at: Time
    author: str
    """The role that published it, and from where."""


class Versions(Answer):
    """Retained versions, newest first."""

    model: str
    versions: tuple[VersionEntry, ...]
    keeps: Count
    """How many versions are retained at most."""


class Rollback(Request):
    """Publish an old version's bytes again, under a new number."""

    version: Version
