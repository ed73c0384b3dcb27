"""Errors of the operator.

OperatorError
  SettingsError        invalid command line
  KubeError            the API server answered with an error
    KubeConflict       409: a precondition failed
      AlreadyExists    409: an object of this name exists
    KubeNotFound       404
    KubeRefused        400, 403, 405, 413, 422: retrying does not help
    ServerFault        401, 408, 429, 5xx: retryable
  NameTaken            the name belongs to another owner
  Unreachable          the API server did not answer
  HeadSilent           a head did not answer, or not with a valid body
    TokenRefused       a head rejected the operator's token
  LeaseLost            another operator leads
"""

from typing import Any


class OperatorError(Exception):
    pass


class SettingsError(OperatorError):
    pass


class KubeError(OperatorError):
    def __init__(self, code: int, document: dict[str, Any], *, request: str) -> None:
        """`document` is the API server's Status object and may lack every field. `request` is the method and path."""
        self.code = code
        self.reason = str(document.get("reason") or "")
        self.message = str(document.get("message") or "")
        details = document.get("details") or {}
        self.causes = tuple(str(cause.get("reason", "")) for cause in details.get("causes") or ())
        self.retry_after_s = float(details.get("retryAfterSeconds") or 0)
        super().__init__(f"{request}: the API server answered {code} {self.reason}: {self.message}")


class KubeConflict(KubeError):
    pass


class AlreadyExists(KubeConflict):
    pass


class KubeNotFound(KubeError):
    pass


class KubeRefused(KubeError):
    pass


class ServerFault(KubeError):
    pass


class NameTaken(OperatorError):
    def __init__(self, what: str, *, is_leaving: bool) -> None:
        """`is_leaving`: Kubernetes is about to delete the object, because it belongs to a deleted job of this name."""
        self.is_leaving = is_leaving
        super().__init__(
            f"{what} is left over from an earlier job of this name; waiting for Kubernetes to delete it"
            if is_leaving
            else f"{what} exists and belongs to another owner; delete it, or rename the job"
        )


class Unreachable(OperatorError):
    pass


class HeadSilent(OperatorError):
    pass


class TokenRefused(HeadSilent):
    pass


class LeaseLost(OperatorError):
    pass
