"""Bearer tokens, one per role. Each role includes the roles before it.

read: every GET except the state, and taking batches. write: weights, pauses, state, seed. operator: group sizes, drain.
"""

import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

import structlog

from cormorant_api.errors import ApiError, TokenError
from cormorant_contract.rest.problems import ProblemType

log = structlog.get_logger()
_SHORTEST = 16


class Role(IntEnum):
    """Roles in ascending order of permissions."""

    READ = 1
    WRITE = 2
    OPERATOR = 3


_ROLES = {role.name.lower(): role for role in Role}


class HeadTokens:
    """The job's tokens, reloaded when their file has changed: a corrected Secret needs no restart. Without a file every
    caller has the role operator.
    """

    def __init__(self, path: Path | None) -> None:
        """Read the file; create it if there is none. TokenError if it is invalid."""
        if path is not None and not path.exists():
            write_tokens(path, {role: secrets.token_urlsafe(32) for role in _ROLES.values()})
            log.info("tokens_made", path=str(path))
        self._path, self._stamp = path, stamp_of(path)
        self.by_role = {} if path is None else read_tokens(path)

    def demand(self, needed: Role, authorization: str | None, *, what: str) -> Role:
        """The caller's role; 401 or 403 if it does not suffice. A changed file is read first."""
        if self._path is not None and (stamp := stamp_of(self._path)) != self._stamp:
            self._stamp = stamp
            try:
                self.by_role = read_tokens(self._path)
            except TokenError as error:  # half of a change: what was read before holds
                log.warning("tokens_not_read", reason=str(error))
            else:
                log.info("tokens_read_again", token_file=str(self._path))
        role = self._role_of(authorization)
        if role < needed:
            raise ApiError(
                ProblemType.FORBIDDEN,
                f"{what} needs the {needed.name.lower()} token; you sent the {role.name.lower()} token",
                role=needed.name.lower(),
            )
        return role

    def sign(self, text: str) -> str:
        """A signature that any head with the same operator token reproduces; empty without tokens."""
        token = self.by_role.get(Role.OPERATOR, "")
        return hmac.new(token.encode(), text.encode(), "sha256").hexdigest() if token else ""

    def _role_of(self, authorization: str | None) -> Role:
        if not self.by_role:
            return Role.OPERATOR
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise ApiError(
                ProblemType.UNAUTHENTICATED,
                "no token; send the job's token as Authorization: Bearer TOKEN, from Python with "
                "connect(url, token_file=...)",
            )
        sent = token.strip().encode("latin-1", "replace")
        # Compare all of them, so that the time taken reveals nothing.
        matching = [role for role, known in self.by_role.items() if hmac.compare_digest(sent, known.encode())]
        if not matching:
            raise ApiError(ProblemType.UNAUTHENTICATED, "invalid token for this job")
        return matching[0]


def stamp_of(path: Path | None) -> tuple[int, ...]:
    """Changes with the file, its mode included; empty: there is none."""
    try:
        stat = None if path is None else path.stat()
    except OSError:
        stat = None
    return () if stat is None else (stat.st_ino, stat.st_ctime_ns, stat.st_size)


def read_tokens(path: Path) -> dict[Role, str]:
    """Read a token file: JSON with read, write and operator."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise TokenError(f"cannot read tokens from {path}: {error}") from error
    # The group may read: Kubernetes mounts a Secret for the pod's fsGroup.
    if mode & 0o007:
        raise TokenError(f"{path} has mode {mode:04o}, so other users can read the tokens; run chmod 600")
    if not isinstance(document, dict) or set(document) != set(_ROLES):
        raise TokenError(f"{path} must contain a JSON object with exactly the keys {', '.join(_ROLES)}")
    tokens: dict[Role, str] = {_ROLES[name]: token for name, token in document.items()}
    if not all(isinstance(token, str) and len(token) >= _SHORTEST and token.isascii() for token in tokens.values()):
        raise TokenError(f"{path}: every token must be an ASCII string of at least {_SHORTEST} characters")
    if len(set(tokens.values())) != len(tokens):
        raise TokenError(f"{path}: two roles have the same token; give each role its own")
    return tokens


def write_tokens(path: Path, by_role: Mapping[Role, str]) -> None:
    """Write a new token file with mode 0600."""
    text = json.dumps({role.name.lower(): token for role, token in by_role.items()}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise TokenError(f"cannot write tokens to {path}: {error}") from error
