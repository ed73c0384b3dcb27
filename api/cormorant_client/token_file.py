"""The file in which a head leaves its tokens: JSON by role, or one token alone."""

import json
import os
from pathlib import Path
from typing import Literal

from cormorant_client.errors import BadAddress

Role = Literal["read", "write", "operator"]
_ROLES: tuple[Role, ...] = ("read", "write", "operator")


def read_token(path: str | os.PathLike[str], role: Role = "write") -> str:
    """The token of a role, or of the next higher one that the file has.

    Raises:
        BadAddress: it cannot be read, or has no token that may do as much.
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
    for candidate in _ROLES[_ROLES.index(role) :]:
        if isinstance(token := tokens.get(candidate), str) and token:
            return token
    found = ", ".join(map(str, tokens)) or "none"
    raise BadAddress(f"the token file {os.fspath(path)} has no token for role {role}; it has {found}")
