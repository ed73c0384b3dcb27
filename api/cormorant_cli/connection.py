"""How commands reach a head: the options they share, the token, and errors as sentences."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cormorant_cli.errors import BadInput, CommandFailed

if TYPE_CHECKING:
    from cormorant_client import Client

Role = Literal["read", "write", "operator"]

_RECONNECT_S = 3.0
"""A person waits: a head that restarts is asked for again by the next command."""

Url = Annotated[
    str, typer.Option("--url", envvar="CORMORANT_URL", metavar="URL", help="The head, like http://127.0.0.1:8000.")
]
Token = Annotated[
    str,
    typer.Option(
        "--token",
        envvar="CORMORANT_TOKEN",
        metavar="TOKEN",
        show_envvar=True,
        help="Others see it in the process list.",
    ),
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        envvar="CORMORANT_TOKEN_FILE",
        metavar="FILE",
        help="The head's token file (JSON by role), or a file with one token.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What the options say."""

    url: str
    token: str
    token_file: str

    @contextmanager
    def client(self, role: Role) -> Iterator["Client"]:
        """A client with the token of a role; what goes wrong inside becomes a sentence.

        Raises:
            BadInput: the URL, the token or what shall be sent cannot be used.
            CommandFailed: the head refuses, or does not answer.
        """
        from cormorant_client import BadAddress, BadTensors, ClientError, Unauthenticated, connect

        token = self.token or (read_token(Path(self.token_file), role) if self.token_file else "")
        try:
            with connect(self.url, token=token, reconnect_s=_RECONNECT_S) as client:
                yield client
        except BadAddress as error:
            raise BadInput(f"{error} (--url, --token, --token-file)") from error
        except BadTensors as error:
            raise BadInput(str(error)) from error
        except Unauthenticated as error:
            hint = "" if token else "; give --token or --token-file"
            raise CommandFailed(f"{error}{hint}") from error
        except ClientError as error:
            raise CommandFailed(str(error)) from error


def read_token(path: Path, role: Role) -> str:
    """The token of a role from the head's token file, or the one token in a file.

    Raises:
        BadInput: it cannot be read, or has no token that may do it.
    """
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the token file {path}: {getattr(error, 'strerror', '') or error}") from error
    if not text.startswith("{"):
        return text
    try:
        tokens = json.loads(text)
    except ValueError as error:
        raise BadInput(f"the token file {path} is not JSON: {error}") from error
    roles: tuple[Role, ...] = ("read", "write", "operator")
    for candidate in roles[roles.index(role) :]:
        if isinstance(token := tokens.get(candidate), str) and token:
            return token
    raise BadInput(f"the token file {path} has no token for {role}; it has {', '.join(map(str, tokens)) or 'none'}")
