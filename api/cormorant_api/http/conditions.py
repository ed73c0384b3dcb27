"""Conditional requests: If-Match (RFC 9110), and Prefer (RFC 7240)."""

import re
from collections.abc import Mapping

from cormorant_api.errors import ApiError
from cormorant_contract.rest.problems import ProblemType

_WAIT = re.compile(r"wait=\"?(\d{1,9}(?:\.\d{1,6})?)\"?")


def check_preconditions(headers: Mapping[str, str], current_etag: str) -> None:
    """Refuse a change whose If-Match fails (412). `current_etag`: with quotes; empty if the resource does not exist."""
    if_match = headers.get("if-match")
    if if_match is None or matches(if_match, current_etag):
        return
    now = f"the current ETag is {current_etag}" if current_etag else "there is no version yet"
    members = {"current_etag": current_etag} if current_etag else {}
    detail = f"If-Match {if_match[:80]} does not match: {now}; fetch the current version and retry"
    raise ApiError(ProblemType.PRECONDITION_FAILED, detail, **members)


def matches(header: str, etag: str) -> bool:
    """Whether an If-Match or If-None-Match names an ETag (with quotes; empty: there is nothing that could match)."""
    return bool(etag) and not {"*", etag}.isdisjoint(part.strip() for part in header.split(","))


def preferred_wait_s(headers: Mapping[str, str], longest_s: float) -> float:
    """Seconds of `Prefer: wait=S`; 0 if it is missing or malformed."""
    match = _WAIT.search(headers.get("prefer", ""))
    return min(float(match[1]), longest_s) if match else 0.0
