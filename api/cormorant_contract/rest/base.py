"""Shared parts of the REST API: types of JSON bodies, names of headers, media types."""

from typing import Annotated

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from cormorant_contract.base import COUNT_MAX

VERSION_MAX = 2**63 - 1
"""Policy versions are stamped on frames as int64."""


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is a boolean; send a number")  # noqa: TRY004  # pydantic reports a ValueError as a field error
    return value


Number = BeforeValidator(_no_boolean)
"""JSON's true and false are not numbers, though Python's are."""
Time = AwareDatetime
Version = Annotated[int, Number, Field(ge=0, le=VERSION_MAX)]
Count = Annotated[int, Number, Field(ge=0, le=COUNT_MAX)]
Millis = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/-]*$")]
"""A name that a client gives itself: a lease owner or a consumer."""


class RequestBody(BaseModel):
    """A body that a client sends. Unknown keys are an error, so that a misspelt one is not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Answer(BaseModel):
    """A body that the head sends. Clients ignore unknown keys: the head may be newer."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


SAFETENSORS = "application/vnd.safetensors"
PROBLEM_JSON = "application/problem+json"
MEMORY_JSON = "application/vnd.cormorant.memory+json"
"""For consumers on the head's machine: the location of the batch in shared memory instead of its bytes."""

BATCH_ID = "Cormorant-Batch-Id"
FRAMES = "Cormorant-Frames"
MIN_VERSION = "Cormorant-Min-Version"
MAX_VERSION = "Cormorant-Max-Version"
DELIVERY = "Cormorant-Delivery"
"""How often the batch has been delivered, from 1."""
ACK_WITHIN = "Cormorant-Ack-Within"
"""Seconds after which an unacknowledged batch goes to the next consumer."""
SETTLED = "Cormorant-Settled"
"""A head's signed count of settled frames, which a consumer sends back with its next request for a batch."""
POLICY_VERSION = "Cormorant-Policy-Version"
"""Version of the weights in the body."""

DIGEST_PREFIX = "xxh3:"


def make_etag(version: int, digest: str) -> str:
    """The strong ETag of a version of weights: `"7:xxh3:..."`, quotes included."""
    return f'"{version}:{digest}"'
