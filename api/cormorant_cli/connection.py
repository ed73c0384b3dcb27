"""The head that a command connects to; shared by all commands.

    --url URL                        a head that can be reached: `cormorant run --serve`, an Ingress, a forwarded port
    JOB [-n NS] [--context CTX]      a job in a cluster: its head's pod via the API server, the token of its Secret

Connection errors become one-sentence messages.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cormorant_cli.errors import BadInput, CommandFailed, HeadAway, NotReady
from cormorant_cli.printing import with_options
from cormorant_contract.children import tokens_secret

if TYPE_CHECKING:
    from cormorant_client import Client, ConnectOptions
    from cormorant_client.transport import Role

RECONNECT_S = 3.0
"""Short, because a person waits and can repeat the command."""
TIMEOUT_S = 30.0
"""A head that is silent for this long counts as unreachable."""
_URL, _TOKEN, _TOKEN_FILE = "CORMORANT_URL", "CORMORANT_TOKEN", "CORMORANT_TOKEN_FILE"

Job = Annotated[str, typer.Argument(metavar="[JOB]", help="Job in the cluster; use instead of --url.")]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", metavar="NS", help="Namespace of the job (default: the context's).")
]
Context = Annotated[
    str, typer.Option("--context", metavar="CTX", help="Context of the kubeconfig (default: the current one).")
]
Url = Annotated[
    str, typer.Option("--url", envvar=_URL, metavar="URL", help="URL of the head, such as http://127.0.0.1:8000.")
]
Token = Annotated[
    str,
    typer.Option(
        "--token",
        envvar=_TOKEN,
        metavar="TOKEN",
        show_envvar=True,
        help="API token. Visible in the process list; prefer --token-file.",
    ),
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        envvar=_TOKEN_FILE,
        metavar="FILE",
        help="Token file of the head (JSON with a token per role), or a file with one token.",
    ),
]
CaFile = Annotated[
    str,
    typer.Option(
        "--ca-file",
        envvar="CORMORANT_CA_FILE",
        metavar="FILE",
        help="Certificates to trust with https (default: the system's; with JOB, ca.crt of the job's Secret).",
    ),
]


_OPTIONS = {
    "job": Job, "namespace": Namespace, "context": Context,
    "url": Url, "token": Token, "token_file": TokenFile, "ca_file": CaFile,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    url: str
    token: str
    token_file: str
    ca_file: str = ""
    job: str = ""
    namespace: str = ""
    context: str = ""
    reconnect_s: float = RECONNECT_S

    def __post_init__(self) -> None:
        if self.job and _given(self.url, _URL):
            raise BadInput(
                f'"{self.job}" names a job of the cluster and --url {self.url} a head; give only one of them'
            )
        if not self.job and (self.namespace or self.context):
            raise BadInput("--namespace and --context need a job's name")
        if not self.job and not self.url:
            raise BadInput("no job or head given; give a job's name, or --url for a head outside a cluster")

    def command(self, word: str) -> str:
        """A command about the same job as the user would write it: `cormorant resume pong -n rl`."""
        options = [
            *(("-n", self.namespace) if self.namespace else ()),
            *(("--context", self.context) if self.context else ()),
        ]
        return " ".join(["cormorant", word, *([self.job] if self.job else []), *options])

    @contextmanager
    def client(self, role: "Role") -> Iterator["Client"]:
        """A client with the token of a role; errors within the block become one-sentence messages."""
        options: ConnectOptions
        if not self.job:
            from cormorant_client import connect

            token = self._own_token(role)
            hint = "" if token else "; give --token or --token-file"
            options = {
                "token": token or None,
                "ca_file": self.ca_file or None,
                "reconnect_s": self.reconnect_s,
            }
            with client_errors(hint), connect(self.url, **options) as client:
                yield client
            return
        from cormorant_cli.cluster import connected, identity
        from cormorant_cli.job_head import connect_to_head, head_pod, token_of

        with connected(self.context) as cluster:
            job = cluster.get("CollectorJob", self.job, namespace=self.namespace or cluster.namespace)
            head_pod(cluster, job)  # report why there is no head, not that its Secret is missing, too
            # CORMORANT_URL and CORMORANT_TOKEN are for heads without a cluster.
            is_own = _given(self.token, _TOKEN) or _given(self.token_file, _TOKEN_FILE)
            options = {
                "token": self._own_token(role) if is_own else token_of(cluster, job, role),
                "ca_file": self.ca_file or None,
                "timeout_s": TIMEOUT_S,
                "reconnect_s": self.reconnect_s,
            }
            hint = "" if is_own else f"; the token comes from Secret {tokens_secret(job['metadata']['name'])}"
            try:
                with client_errors(hint), connect_to_head(cluster, job, **options) as client:
                    yield client
            except HeadAway as error:
                raise HeadAway(
                    f"the head of {identity(job)} does not answer through the API server: {error}"
                ) from error

    def _own_token(self, role: "Role") -> str:
        if self.token or not self.token_file:
            return self.token
        from cormorant_client.transport import read_token

        with client_errors():
            return read_token(self.token_file, role)


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select the head to a command, which receives them as `connection`."""

    def take(values: dict[str, Any]) -> None:
        values["connection"] = Connection(**{name: values.pop(name) for name in _OPTIONS})

    return with_options(command, _OPTIONS, take, makes="connection")


@contextmanager
def client_errors(hint: str = "") -> Iterator[None]:
    """Turn the client's errors within the block into those of the command line. `hint`: ends the message about a bad
    token.
    """
    from cormorant_client import BadAddress, FleetError, HeadUnreachable, NotNow, Unauthenticated, WeightsError

    try:
        yield
    except BadAddress as error:
        raise BadInput(str(error)) from error
    except Unauthenticated as error:
        raise CommandFailed(f"{error}{hint}") from error
    except NotNow as error:
        raise NotReady(str(error)) from error
    except HeadUnreachable as error:
        raise HeadAway(str(error)) from error
    except FleetError as error:
        raise CommandFailed(str(error)) from error
    except WeightsError as error:
        raise BadInput(str(error)) from error


def _given(value: str, variable: str) -> bool:
    """Whether a value is from the command line, not the environment."""
    return bool(value) and value != os.environ.get(variable, "")
