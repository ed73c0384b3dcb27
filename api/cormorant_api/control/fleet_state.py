"""A fleet's state as it comes from a client: checked before the fleet sees it."""

import json

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cormorant_api.errors import ApiError
from cormorant_api.http.uploads import parse_body
from cormorant_contract.rest.base import Count, Version
from cormorant_contract.rest.problems import ProblemType
from cormorant_contract.tensor_file import TensorFile
from cormorant_worker.errors import CormorantError
from cormorant_worker.fleet.fleet_state import FleetState
from cormorant_worker.weights.blob import WeightsBlob

_KEY = "cormorant_fleet"
_WORKER = "worker/"


class _Document(BaseModel):
    """Metadata of a state. The fleet judges keys of newer formats."""

    model_config = ConfigDict(extra="allow", strict=True)
    format: int
    frames: Count
    version: Version
    attempts: dict[str, Count]
    seed: Count
    run: str = ""
    epoch: Count = 0
    dataset: str = ""
    written: dict[str, Count] = Field(default={})


def read_state(data: memoryview) -> FleetState:
    """Parse a fleet's state.

    Raises:
        ApiError: 400, 415, 422.
    """
    parsed = parse_body(data)
    try:
        document = _Document.model_validate(json.loads(parsed.metadata.get(_KEY, "")))
        _check_parts(parsed, document)
        return FleetState.from_bytes(data)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise _mismatch(f"invalid {_KEY}: {found}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _mismatch(f"{_KEY} is missing from the metadata or malformed: {str(error)[:200]}") from error


def weights_in(saved: FleetState) -> tuple[WeightsBlob, int] | None:
    """Published weights in a state and their version; None if nothing had been published."""
    if not saved.weights or not saved.version:
        return None
    blob = WeightsBlob.joined((saved.weights,))
    blob.statistics = saved.statistics.get(saved.version)
    try:
        return blob.check(), saved.version
    except CormorantError:
        return None  # the fleet accepted the state but did not need these


def _check_parts(parsed: TensorFile, document: _Document) -> None:
    workers = {name.removeprefix(_WORKER) for name in parsed.tensors if name.startswith(_WORKER)}
    if workers != set(document.attempts):
        raise ValueError(f"it contains workers {sorted(workers)} but attempts of {sorted(document.attempts)}")
    if odd := [name for name, entry in parsed.tensors.items() if entry.dtype != "U8" or len(entry.shape) != 1]:
        raise ValueError(f"{odd[0][:80]} is not a byte array")


def _mismatch(what: str) -> ApiError:
    return ApiError(
        ProblemType.STATE_MISMATCH, f"the body is not a state of a fleet: {what}; send what GET /v1/state returned"
    )
