"""Conditional requests: If-Match, If-None-Match (RFC 9110), and Prefer (RFC 7240)."""

import re
from collections.abc import Mapping

from cormorant_api.errors import ApiError
from cormorant_contract.rest.problems import ProblemType

_WAIT = re.compile(r"wait=\"?(\d{1,9}(?:\.\d{1,6})?)\"?")


def check_preconditions(headers: Mapping[str, str], current_etag: str) -> None:
    """Refuse a change whose preconditions fail (412). `current_etag`: with quotes; empty if the resource does not
    exist.
    """
    if_match, if_none = headers.get("if-match"), headers.get("if-none-match", "")
    if if_match is not None and not matches(if_match, current_etag):
        what = f"If-Match {if_match[:80]} does not match"
    elif matches(if_none, current_etag, is_weak=True):
        what = f"If-None-Match {if_none[:80]} matches"
    else:
        return
    now = f"the current ETag is {current_etag}" if current_etag else "there is no version yet"
    members = {"current_etag": current_etag} if current_etag else {}
    raise ApiError(ProblemType.PRECONDITION_FAILED, f"{what}: {now}; fetch the current version and retry", **members)


def matches(header: str, etag: str, *, is_weak: bool = False) -> bool:
    """Whether an If-Match or If-None-Match names an ETag (with quotes; empty: there is nothing that could match)."""
    if not etag:
        return False
    known = [part.strip() for part in header.split(",")]
    if is_weak:
        known = [part.removeprefix("W/") for part in known]
    return "*" in known or etag in known


def preferred_wait_s(headers: Mapping[str, str], longest_s: float) -> float:
    """Seconds of `Prefer: wait=S`; 0 if it is missing or malformed."""
    match = _WAIT.search(headers.get("prefer", ""))
    return min(float(match[1]), longest_s) if match else 0.0
