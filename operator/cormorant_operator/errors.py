"""What goes wrong between the operator and what it talks to.

OperatorError
  SettingsError        the operator was started with values that cannot be used
  ApiError             the API server answered with an error
    Conflict           409: it exists already, or a precondition does not hold
    NotFound           404
    Refused            400, 403, 422: asking again with the same words will not help
    ServerFault        408, 429, 500 and above: asked again and again it could not; it may later
  NameTaken            an object of the name exists and belongs to another owner
  Unreachable          no answer from the API server within the time
  HeadSilent           a head did not answer, or with nothing that can be read
    TokenRefused       a head answered that it does not know the operator's token
  LeaseLost            another operator leads
"""

from typing import Any


class OperatorError(Exception):
    pass


class SettingsError(OperatorError):
    """The operator was started with values that cannot be used."""


class ApiError(OperatorError):
    """The API server answered with an error."""

    def __init__(self, code: int, document: dict[str, Any], *, request: str) -> None:
        """Keep what a Status object says.

        Args:
            code: of the HTTP answer.
            document: the Status object; may lack everything.
            request: method and path, for the message.
        """
        self.code = code
        self.reason = str(document.get("reason") or "")
        self.message = str(document.get("message") or "")
        details = document.get("details") or {}
        self.causes = tuple(str(cause.get("reason", "")) for cause in details.get("causes") or ())
        self.retry_after_s = float(details.get("retryAfterSeconds") or 0)
        super().__init__(f"{request}: the API server answered {code} {self.reason}: {self.message}")


class Conflict(ApiError):
    """409: it exists already, or a precondition does not hold."""


class NotFound(ApiError):
    pass


class Refused(ApiError):
    """400, 403, 422: asking again with the same words will not help."""


class ServerFault(ApiError):
    """408, 429, 500 and above: asked again and again it could not; it may later."""


class NameTaken(OperatorError):
    """An object of the name exists and belongs to another owner."""

    def __init__(self, what: str, *, is_leaving: bool) -> None:
        """Say what is in the way.

        Args:
            what: kind and name.
            is_leaving: it belongs to an earlier job of this name, and Kubernetes deletes it.
        """
        self.is_leaving = is_leaving
        super().__init__(
            f"{what} is left over from an earlier job of this name; waiting for Kubernetes to delete it"
            if is_leaving
            else f"{what} exists and belongs to another owner; delete it, or rename the job"
        )


class Unreachable(OperatorError):
    """No answer from the API server within the time."""


class HeadSilent(OperatorError):
    """A head did not answer, or with nothing that can be read."""


class TokenRefused(HeadSilent):
    """A head answered that it does not know the operator's token."""


class LeaseLost(OperatorError):
    pass
