"""Errors of clients. Every message says what happened, the values, and what to do.

Errors that local fleets also raise have the same base class: `except WeightsMismatch` catches both.
"""

from collections.abc import Mapping

from cormorant_contract.errors import BatchTimeout as BatchTimeout
from cormorant_contract.errors import ControlTimeout as ControlTimeout
from cormorant_contract.errors import CormorantError as CormorantError
from cormorant_contract.errors import FleetClosed as FleetClosed
from cormorant_contract.errors import FleetError as FleetError
from cormorant_contract.errors import NonfiniteWeights as NonfiniteWeights
from cormorant_contract.errors import StaleWeights as StaleWeights
from cormorant_contract.errors import StateError as StateError
from cormorant_contract.errors import UpdateFailed as UpdateFailed
from cormorant_contract.errors import WeightsError as WeightsError
from cormorant_contract.errors import WeightsMismatch as WeightsMismatch
from cormorant_contract.rest.problems import Problem, ProblemType

_DIFFERENCES = ("missing", "unexpected", "shape", "dtype")


class ClientError(FleetError):
    """The head failed, refused a request, or could not be reached."""


class BadAddress(ClientError):
    """Invalid URL, token or certificate."""


class HeadUnreachable(ClientError):
    """The head could not be reached, or did not answer in time."""


class ClientClosed(HeadUnreachable, FleetClosed):
    """The client was closed."""

    def __init__(self) -> None:
        super().__init__("the client is closed; connect again")


class BadBatch(ClientError):
    """The bytes of a batch do not match its header."""


class BatchGone(ClientError):
    """The batch was acknowledged and its shared memory returned to the head."""


class HeadError(ClientError):
    """The head answered with a problem document."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem: Problem = problem
        """The problem document."""
        self.kind: str = problem.kind
        """The problem's type, one of `ProblemType`."""
        self.status: int = problem.status
        """The HTTP status."""
        self.is_of_repetition: bool = False
        """True when the connection broke at the same request before: the head may have done what was asked then."""


class Unauthenticated(HeadError):
    """401: missing or unknown token."""


class Forbidden(HeadError):
    """403: the token's role does not permit this."""


class NotFound(HeadError):
    """404, 410: no such model, update, batch or version, or no longer."""


class StreamEnded(HeadError):
    """All frames of the job are delivered and acknowledged."""


class Conflict(HeadError):
    """409, 412: the head's current state does not allow the request; `problem.current_version` may name the version."""


class VersionTaken(Conflict, StaleWeights):
    """The version is not higher than the published one (`problem.current_version`)."""


class Refused(HeadError):
    """400, 411, 413, 415, 422: the request itself is invalid."""


class TensorMismatch(Refused, WeightsMismatch):
    """The tensors do not match the policy; `differences` names some of them."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        lists = {what: getattr(problem, what) for what in _DIFFERENCES}
        self.differences = {what: difference.names for what, difference in lists.items() if difference is not None}


class NotFinite(Refused, NonfiniteWeights):
    """Some values are NaN or infinite, which was not allowed."""


class StateMismatch(Refused, StateError):
    """The state is of another job or layout."""


class NotNow(HeadError):
    """429, 503: busy, draining, or no workers yet; retry later."""


class HeadFailed(HeadError):
    """500 and above: the head or its fleet failed."""


_BY_KIND: Mapping[str, type[HeadError]] = {
    ProblemType.TENSOR_MISMATCH: TensorMismatch,
    ProblemType.NOT_FINITE: NotFinite,
    ProblemType.STATE_MISMATCH: StateMismatch,
    ProblemType.VERSION_CONFLICT: VersionTaken,
    ProblemType.STREAM_ENDED: StreamEnded,
    ProblemType.FLEET_FAILED: HeadFailed,
    ProblemType.STORE_FAILED: HeadFailed,
}
_BY_STATUS: Mapping[int, type[HeadError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: NotFound,
    412: Conflict,
    429: NotNow,
    503: NotNow,
}


def error_for(status: int, body: bytes, *, where: str) -> HeadError:
    """Turn a response into an error.

    Args:
        body: problem+json; other bodies are from a proxy and are quoted.
        where: method and URL, for the message.
    """
    try:
        problem = Problem.model_validate_json(body)
    except ValueError:
        text = " ".join(body[:200].decode("utf-8", "replace").split())
        detail = (
            f"{where} answered {status}, which is not the answer of a Cormorant head: "
            f"{text or 'an empty body'}; check the URL"
        )
        problem = Problem(type="about:blank", title=f"HTTP {status}", status=status, detail=detail)
    known = _BY_KIND.get(problem.kind) or _BY_STATUS.get(status)
    return (known or (HeadFailed if status >= 500 else Refused))(problem)
