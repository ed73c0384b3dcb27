"""`/v1/models`: the models that can be published, and their versions."""

from cormorant_contract.rest.base import Answer, Count, RequestBody, Time, Version


class TensorShape(Answer):
    """Name, dtype and shape that one published tensor must have."""

    name: str
    dtype: str
    """The safetensors name, e.g. "F32"."""
    shape: tuple[int, ...]


class ModelSummary(Answer):
    """One named model of the policy."""

    name: str
    version: Version
    """Newest published version of this model; 0: it still uses its initial weights."""
    digest: str = ""
    """`xxh3:` and 32 hex digits of the published file; empty before the first publish."""
    etag: str = ""
    bytes: Count = 0
    """Size of the published file."""
    num_tensors: Count


class Model(ModelSummary):
    """One named model with its tensor specs."""

    tensors: tuple[TensorShape, ...]
    workers_by_version: dict[str, Count]
    """Number of workers that use each policy version; keys are decimal numbers."""


class Models(Answer):
    """Every named model."""

    models: tuple[ModelSummary, ...]
    version: Version
    """Newest published version of any model."""


class VersionEntry(Answer):
    """One retained version of a model."""

    version: Version
    digest: str
    etag: str
    bytes: Count
    published_at: Time
    author: str
    """Role and address of the publisher."""


class Versions(Answer):
    """Retained versions, newest first."""

    model: str
    versions: tuple[VersionEntry, ...]
    keeps: Count
    """Maximum number of retained versions."""


class Rollback(RequestBody):
    """Publish the weights of a retained version again, under a new version number."""

    version: Version
