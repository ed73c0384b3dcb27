"""How commands reach a head: the options they share, the token, and errors as sentences."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.errors import BadInput, CommandFailed

if TYPE_CHECKING:
    from cormorant_client import Client
    from cormorant_client.token_file import Role

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
    def client(self, role: "Role") -> Iterator["Client"]:
        """A client with the token of a role; what goes wrong inside becomes a sentence.

        Raises:
            BadInput: the URL, the token or what shall be sent cannot be used.
            CommandFailed: the head refuses, or does not answer.
        """
        from cormorant_client import BadAddress, BadTensors, ClientError, Unauthenticated, connect
        from cormorant_client.token_file import read_token

        token = self.token
        try:
            if not token and self.token_file:
                token = read_token(self.token_file, role)
            with connect(self.url, token=token, reconnect_s=_RECONNECT_S) as client:
                yield client
        except (BadAddress, BadTensors) as error:
            raise BadInput(str(error)) from error
        except Unauthenticated as error:
            hint = "" if token else "; give --token or --token-file"
            raise CommandFailed(f"{error}{hint}") from error
        except ClientError as error:
            raise CommandFailed(str(error)) from error
