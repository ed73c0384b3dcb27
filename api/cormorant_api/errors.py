"""Errors of the head, and their exit codes."""

from typing import Any

from cormorant_contract.rest.problems import ProblemType
from cormorant_worker.errors import DeviceUnavailable, EnvCrashed, EnvError, ManifestError, WorkerFailed


class ApiError(Exception):
    """Raised anywhere below a route; one handler turns it into problem+json."""

    def __init__(self, kind: ProblemType, detail: str, /, **members: Any) -> None:
        """`members`: further members of the problem. `retry_after_s` is also sent as a header; `status` overrides the
        type's.
        """
        super().__init__(detail)
        self.status: int = members.pop("status", kind.status)
        self.kind = kind
        self.detail = detail
        self.members = members


class HeadFault(Exception):
    """The head cannot start or continue."""


class TokenError(HeadFault):
    """A token file that is invalid or readable by other users."""


class StoreError(HeadFault):
    """The head's directory cannot be read or written."""


EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, EXIT_BLOCKED = 0, 1, 2, 3
"""Job complete; a retry may succeed; invalid input; the environment (disk, device, Secret) must be fixed first."""

_WRONG_INPUT = ("ManifestError", "UnknownEnv", "PolicyLoadError", "PolicyMismatch")
"""Worker errors caused by the manifest or its code: the same in every pod."""
_NOT_OF_THE_VOLUME = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def exit_code_of(error: Exception) -> int:
    """The exit code for an error. Only invalid input is final."""
    kind = error.kind if isinstance(error, WorkerFailed) else ""
    # A token file is a Secret that the operator restores.
    if isinstance(error, (DeviceUnavailable, StoreError, TokenError)) or kind == "DeviceUnavailable":
        return EXIT_BLOCKED
    # The file system caused the error (full, stale, read-only, no permission), rather than a wrong path.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    if cause is not None and not isinstance(cause, _NOT_OF_THE_VOLUME):
        return EXIT_BLOCKED
    if isinstance(error, EnvCrashed):
        return EXIT_FAILED
    is_input = isinstance(error, (HeadFault, ManifestError, EnvError)) or kind in _WRONG_INPUT
    return EXIT_REFUSED if is_input else EXIT_FAILED
