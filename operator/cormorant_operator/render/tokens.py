"""A job's tokens, derived from the operator's one key: a restarted operator needs to read no Secret."""

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One token a role, and Ray's own."""

    read: str = field(repr=False)
    write: str = field(repr=False)
    operator: str = field(repr=False)
    ray: str = field(repr=False)


@lru_cache(maxsize=1 << 16)
def derive(key: bytes, *, uid: str) -> Tokens:
    """The tokens of a job.

    Args:
        key: the operator's.
        uid: of the job: one that is made again under its name has other tokens.
    """

    def token(role: str) -> str:
        raw = hmac.digest(key, f"{uid}/{role}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    return Tokens(read=token("read"), write=token("write"), operator=token("operator"), ray=token("ray"))
