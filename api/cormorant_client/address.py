"""Parses a head's URL, and reads the token file that a head writes."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from cormorant_client.errors import BadAddress

Role = Literal["read", "write", "operator"]
ROLES: tuple[Role, ...] = ("read", "write", "operator")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    """Path before `/v1`, for heads behind a proxy."""

    @property
    def is_loopback(self) -> bool:
        """True if the address can only be this machine."""
        return self.host in _LOOPBACK

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"


def parse_address(url: str) -> Address:
    """Read `http://host:8000`.

    Raises:
        BadAddress: not an http or https URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadAddress(f'"{url}" is not a URL: {error}; use the form http://127.0.0.1:8000') from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise BadAddress(f'"{url}" is not the URL of a head; use the form http://127.0.0.1:8000')
    if parts.username or parts.password or parts.query or parts.fragment:
        raise BadAddress("a head's URL has only scheme, host and port; pass the token as a separate argument")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(host=parts.hostname, port=port or (443 if is_tls else 80), is_tls=is_tls, prefix=prefix)


def read_token(path: str | os.PathLike[str], role: Role = "write") -> str:
    """Read the token of a role, or of the next higher role in the file: JSON by role, or one token alone.

    Raises:
        BadAddress: the file cannot be read, or has no token of this role or a higher one.
    """
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or error
        raise BadAddress(f"cannot read the token file {os.fspath(path)}: {reason}") from error
    if not text.startswith("{"):
        return text
    try:
        tokens = json.loads(text)
    except ValueError as error:
        raise BadAddress(f"the token file {os.fspath(path)} is not valid JSON: {error}") from error
    for candidate in ROLES[ROLES.index(role) :]:
        if isinstance(token := tokens.get(candidate), str) and token:
            return token
    found = ", ".join(map(str, tokens)) or "none"
    raise BadAddress(f"the token file {os.fspath(path)} has no token for role {role}; it has {found}")
