"""Errors of the head, and the exit codes that they end it with.

ApiError             an answer to a request: a status and a problem type
HeadError            the head cannot start or go on; its message is for whoever started it
  TokenError         a token file that cannot be used, or that others can read
  TlsError           a certificate that cannot be used
  StoreError         the weights' directory cannot be read or written
"""

from typing import Any

from cormorant_contract.rest.problems import ProblemType
from cormorant_worker.errors import DeviceUnavailable, EnvCrashed, EnvError, ManifestError, WorkerFailed


class ApiError(Exception):
    """Raised anywhere below a route; one handler makes problem+json of it."""

    def __init__(self, status: int, kind: ProblemType, detail: str, /, **members: Any) -> None:
        """Describe the problem.

        Args:
            status: the HTTP status.
            kind: the stable type.
            detail: what happened, the values, and what to do.
            members: further members of the problem; `retry_after_s` becomes a header, too.
        """
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.members = members


class HeadError(Exception):
    """The head cannot start or go on: one sentence."""


class TokenError(HeadError):
    """A token file that cannot be used."""


class TlsError(HeadError):
    """A certificate that cannot be used."""


class StoreError(HeadError):
    """The weights' directory cannot be read or written."""


EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, EXIT_BLOCKED = 0, 1, 2, 3
"""Everything is delivered; it may work the next time; what was given cannot be used; surroundings come first."""

_WRONG_INPUT = ("ManifestError", "UnknownEnv", "PolicyLoadError", "PolicyMismatch")
"""What a worker says of the manifest and its code, by class: the same in every pod."""
_NOT_OF_THE_VOLUME = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def exit_code_of(error: Exception) -> int:
    """How a head ends for an error: wrong input is refused for good, and nothing else is."""
    kind = error.kind if isinstance(error, WorkerFailed) else ""
    # A token file is a Secret that others may have changed; the operator puts it right.
    if isinstance(error, (DeviceUnavailable, StoreError, TokenError)) or kind == "DeviceUnavailable":
        return EXIT_BLOCKED
    if _is_of_the_volume(error):
        return EXIT_BLOCKED
    if isinstance(error, EnvCrashed):
        return EXIT_FAILED
    is_input = isinstance(error, (HeadError, ManifestError, EnvError)) or kind in _WRONG_INPUT
    return EXIT_REFUSED if is_input else EXIT_FAILED


def _is_of_the_volume(error: BaseException | None) -> bool:
    """Whether an error of a file system is behind it (full, stale, read-only, no permission), and not a wrong path."""
    while error is not None:
        if isinstance(error, OSError):
            return not isinstance(error, _NOT_OF_THE_VOLUME)
        error = error.__cause__
    return False
