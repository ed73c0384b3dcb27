"""Errors of the head.

ApiError             an answer to a request: a status and a problem type
HeadError            the head cannot start or go on; its message is for whoever started it
  TokenError         a token file that cannot be used, or that others can read
  TlsError           a certificate that cannot be used
  StoreError         the weights' directory cannot be read or written
"""

from typing import Any

from cormorant_contract.rest.problems import ProblemType


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
