"""Conditional requests: If-Match, If-None-Match (RFC 9110), and Prefer (RFC 7240)."""

import re
from collections.abc import Mapping

from cormorant_api.errors import ApiError
from cormorant_contract.rest.problems import ProblemType

_WAIT = re.compile(r"wait=\"?(\d{1,9}(?:\.\d{1,6})?)\"?")


def check_preconditions(headers: Mapping[str, str], current_etag: str) -> None:
    """Refuse a change whose preconditions fail. `current_etag`: with quotes; empty while there is nothing.

    Raises:
        ApiError: 412.
    """
    if_match, if_none = headers.get("if-match"), headers.get("if-none-match")
    if if_match is not None and not _matches(if_match, current_etag):
        raise _failed(f"If-Match {if_match[:80]} does not match", current_etag)
    if if_none is not None and _matches(if_none, current_etag, is_weak=True):
        raise _failed(f"If-None-Match {if_none[:80]} matches", current_etag)


def demand_if_match(headers: Mapping[str, str]) -> None:
    """Refuse a partial publish without a base version.

    Raises:
        ApiError: 428.
    """
    if "if-match" not in headers:
        raise ApiError(
            ProblemType.PRECONDITION_REQUIRED,
            "a partial publish needs a base version; send If-Match with the ETag of that version, or * for the newest",
        )


def names_etag(headers: Mapping[str, str], etag: str) -> bool:
    return _matches(headers.get("if-match", ""), etag)


def is_unchanged(headers: Mapping[str, str], etag: str) -> bool:
    """Whether a GET may be answered with 304."""
    if_none = headers.get("if-none-match")
    return if_none is not None and _matches(if_none, etag, is_weak=True)


def preferred_wait_s(headers: Mapping[str, str], longest_s: float) -> float:
    """Seconds of `Prefer: wait=S`; 0 if it is missing or malformed."""
    match = _WAIT.search(headers.get("prefer", ""))
    return min(float(match[1]), longest_s) if match else 0.0


def _matches(header: str, etag: str, *, is_weak: bool = False) -> bool:
    if not etag:
        return False
    known = [part.strip() for part in header.split(",")]
    if is_weak:
        known = [part.removeprefix("W/") for part in known]
    return "*" in known or etag in known


def _failed(what: str, current_etag: str) -> ApiError:
    now = f"the current ETag is {current_etag}" if current_etag else "there is no version yet"
    members = {"current_etag": current_etag} if current_etag else {}
    return ApiError(ProblemType.PRECONDITION_FAILED, f"{what}: {now}; fetch the current version and retry", **members)
