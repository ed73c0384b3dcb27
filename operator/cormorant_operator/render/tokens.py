"""A job's tokens, derived from the operator's key, so that a restarted operator need not read Secrets."""

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One token per role, and Ray's."""

    read: str = field(repr=False)
    write: str = field(repr=False)
    operator: str = field(repr=False)
    ray: str = field(repr=False)


@lru_cache(maxsize=1 << 16)
def derive(key: bytes, *, uid: str) -> Tokens:
    """The tokens of the job with this uid; a recreated job of the same name has others."""

    def token(role: str) -> str:
        raw = hmac.digest(key, f"{uid}/{role}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    return Tokens(read=token("read"), write=token("write"), operator=token("operator"), ray=token("ray"))
