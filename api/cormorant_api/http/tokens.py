"""Bearer tokens, one per role. Each role includes the roles before it.

read: every GET except the state, and taking batches. write: weights, pauses, state, seed. operator: group sizes, drain.
"""

import hmac
import json
import os
import secrets
import stat
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import structlog

from cormorant_api.errors import ApiError, TokenError
from cormorant_contract.rest.problems import ProblemType

log = structlog.get_logger()
_SHORTEST = 16


class Role(IntEnum):
    """In ascending order of permissions."""

    NOBODY = 0
    READ = 1
    WRITE = 2
    OPERATOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The job's tokens. Without tokens every caller has the role operator."""

    by_role: dict[Role, str] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls) -> "Tokens":
        """New random tokens of 256 bits each."""
        return cls(by_role={role: secrets.token_urlsafe(32) for role in Role if role is not Role.NOBODY})

    @classmethod
    def read(cls, path: Path) -> "Tokens":
        """Read a token file: JSON with read, write and operator.

        Raises:
            TokenError: the file is invalid, or readable by other users.
        """
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            document = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise TokenError(f"cannot read tokens from {path}: {error}") from error
        # The group may read: Kubernetes mounts a Secret for the pod's fsGroup.
        if mode & 0o007:
            raise TokenError(f"{path} has mode {mode:04o}, so other users can read the tokens; run chmod 600")
        names = {role.name.lower(): role for role in Role if role is not Role.NOBODY}
        if not isinstance(document, dict) or set(document) != set(names):
            raise TokenError(f"{path} must contain a JSON object with exactly the keys {', '.join(names)}")
        found: dict[Role, str] = {names[name]: token for name, token in document.items()}
        if not all(isinstance(token, str) and len(token) >= _SHORTEST and token.isascii() for token in found.values()):
            raise TokenError(f"{path}: every token must be an ASCII string of at least {_SHORTEST} characters")
        if len(set(found.values())) != len(found):
            raise TokenError(f"{path}: two roles have the same token; give each role its own")
        return cls(by_role=found)

    def write(self, path: Path) -> None:
        """Write a token file with mode 0600.

        Raises:
            TokenError: it exists, or cannot be written.
        """
        text = json.dumps({role.name.lower(): token for role, token in self.by_role.items()}, indent=2)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text + "\n")
        except OSError as error:
            raise TokenError(f"cannot write tokens to {path}: {error}") from error

    def role_of(self, authorization: str | None) -> Role:
        """The role that an Authorization header proves.

        Raises:
            ApiError: 401, no bearer token, or not a token of this job.
        """
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
        found = Role.NOBODY
        for role, known in self.by_role.items():
            # Compare all of them, so that the time taken reveals nothing.
            if hmac.compare_digest(sent, known.encode()):
                found = role
        if found is Role.NOBODY:
            raise ApiError(ProblemType.UNAUTHENTICATED, "invalid token for this job")
        return found

    def demand(self, needed: Role, authorization: str | None, *, what: str) -> Role:
        """The caller's role, if it is sufficient.

        Raises:
            ApiError: 401 as `role_of`; 403, another role is needed.
        """
        role = self.role_of(authorization)
        if role < needed:
            raise ApiError(
                ProblemType.FORBIDDEN,
                f"{what} needs the {needed.name.lower()} token; you sent the {role.name.lower()} token",
                role=needed.name.lower(),
            )
        return role


class TokenKeeper:
    """The job's tokens, reloaded when their file has changed: a corrected Secret needs no restart."""

    def __init__(self, tokens: Tokens, path: Path | None) -> None:
        """`path` is the tokens' file; None: they never change."""
        self.tokens = tokens
        self._path = path
        self._seen = self._stamp()

    def demand(self, needed: Role, authorization: str | None, *, what: str) -> Role:
        """See `Tokens.demand`. An unknown token reloads a changed file first."""
        try:
            return self.tokens.demand(needed, authorization, what=what)
        except ApiError as error:
            if error.status != 401 or not self._read_again():
                raise
        return self.tokens.demand(needed, authorization, what=what)

    def _read_again(self) -> bool:
        if self._path is None or (stamp := self._stamp()) == self._seen:
            return False
        self._seen = stamp
        try:
            self.tokens = Tokens.read(self._path)
        except TokenError as error:
            log.warning("tokens_not_read", reason=str(error))
            return False
        log.info("tokens_read_again", token_file=str(self._path))
        return True

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return 0, 0
        return (found.st_ino, found.st_mtime_ns) if found is not None else (0, 0)
