"""The head that a command connects to; shared by all commands.

    --url URL                        a head that can be reached: `cormorant run --serve`, an Ingress, a forwarded port
    JOB [-n NS] [--context CTX]      a job in a cluster: its head's pod via the API server, the token of its Secret

client ──> socket of the Kubernetes client ──web socket──> API server ──> kubelet ──> pod:port

Connection errors become one-sentence messages.
"""

import base64
import functools
import inspect
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from cormorant_cli.cluster import ANSWER_S, Cluster, Raw, connected, holds, identity
from cormorant_cli.errors import BadInput, CliError, CommandFailed, HeadGone, NotAllowed, NotReady, ObjectMissing
from cormorant_contract.children import API_PORT, EPOCH, HEAD, JOB_UID, ROLE, api_host, tls_secret, tokens_secret
from cormorant_contract.errors import StateError

if TYPE_CHECKING:
    from cormorant_client import Client, ConnectOptions
    from cormorant_client.transport import Address, Role

RECONNECT_S = 3.0
"""Short, because a person waits and can repeat the command."""
TIMEOUT_S = 30.0
"""A head that is silent for this long counts as unreachable."""

Job = Annotated[str, typer.Argument(metavar="[JOB]", help="Job in the cluster; use instead of --url.")]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", metavar="NS", help="Namespace of the job (default: the context's).")
]
Context = Annotated[
    str, typer.Option("--context", metavar="CTX", help="Context of the kubeconfig (default: the current one).")
]
Url = Annotated[
    str, typer.Option("--url", metavar="URL", help="URL of a head outside a cluster (default: CORMORANT_URL).")
]
Token = Annotated[
    str,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="API token. Visible in the process list; prefer --token-file (default with a URL: CORMORANT_TOKEN).",
    ),
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Token file of the head (JSON with a token per role), or a file with one token (default with a URL: "
        "CORMORANT_TOKEN_FILE).",
    ),
]
CaFile = Annotated[
    str,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        help="Certificates to trust with https (default: the system's; with JOB, ca.crt of the job's Secret).",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options that select the head, by their parameters' names."""

    job: Job = ""
    namespace: Namespace = ""
    context: Context = ""
    url: Url = ""
    token: Token = ""
    token_file: TokenFile = ""
    ca_file: CaFile = ""

    def __post_init__(self) -> None:
        if self.job and self.url:
            raise BadInput(
                f'"{self.job}" names a job of the cluster and --url {self.url} a head; give only one of them'
            )
        if not self.job and (self.namespace or self.context):
            raise BadInput("--namespace and --context need a job's name")
        if not self.job and not self.url and not os.environ.get("CORMORANT_URL"):
            raise BadInput("no job or head given; give a job's name, or --url for a head outside a cluster")

    @contextmanager
    def client(self, role: "Role", *, reconnect_s: float = RECONNECT_S) -> Iterator["Client"]:
        """A client with the token of a role; errors within the block become one-sentence messages."""
        options: ConnectOptions = {
            "token": self.token or None,
            "token_file": self.token_file or None,
            "ca_file": self.ca_file or None,
            "timeout_s": TIMEOUT_S,
            "reconnect_s": reconnect_s,
        }
        if not self.job:
            from cormorant_client import connect

            with client_errors(), connect(self.url or None, **options) as client:
                yield client
            return
        with (
            connected(self.context) as cluster,
            client_errors(),
            connect_to_job(cluster, self.job, role, namespace=self.namespace, **options) as client,
        ):
            yield client


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select the head to a command, which receives them as `connection`."""
    options = Connection.__annotations__
    given = inspect.signature(command)
    parameters = [known for name, known in given.parameters.items() if name != "connection"]
    for name, annotation in options.items():
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default="", annotation=annotation)
        )

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(connection=Connection(**{name: values.pop(name) for name in options}), **values)

    run.__signature__ = given.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn the client's errors within the block into those of the command line."""
    from cormorant_client import BadAddress, FleetError, HeadUnreachable, NotNow, WeightsError

    try:
        yield
    except BadAddress as error:
        raise BadInput(str(error)) from error
    except (NotNow, HeadUnreachable) as error:
        raise NotReady(str(error)) from error
    except (FleetError, StateError) as error:
        raise CommandFailed(str(error)) from error
    except WeightsError as error:
        raise BadInput(str(error)) from error


# -- the head of a job -------------------------------------------------------------------------------------------------


def connect_to_job(
    cluster: Cluster, name: str, role: "Role", *, namespace: str = "", **options: Unpack["ConnectOptions"]
) -> "Client":
    """A client that opens each connection to the job's newest head. `cluster` must outlive it. Unless `options` have a
    token, it has that of the role from the job's Secret. Trusts ca.crt of the job's Secret for a head with TLS, or the
    system's authorities if the Secret lacks it or the user may not read it.
    """
    from cormorant_client import connect
    from cormorant_client.transport import read_token

    namespace = namespace or cluster.namespace
    job = cluster.get("CollectorJob", name, namespace=namespace)
    head_pod(cluster, job)  # report why there is no head, not that its Secret is missing, too
    token_file, token = options.pop("token_file", None), options.get("token")
    if not token:
        options["token"] = read_token(token_file, role) if token_file else _token_of(cluster, job, role)
    answer_s = options.get("timeout_s") or ANSWER_S

    def dial(address: "Address", _timeout_s: float) -> socket.socket:
        try:
            return cluster.open_port(head_pod(cluster, job), address.port, namespace=namespace, timeout_s=answer_s)
        except CliError as error:
            raise ConnectionError(str(error)) from error

    tls = (job["spec"].get("head") or {}).get("tls")
    if tls and not options.get("ca_file") and not options.get("ca_data"):
        try:
            secret = cluster.get("Secret", tls.get("secretName") or tls_secret(name), namespace=namespace)
        except (NotAllowed, ObjectMissing):
            secret = {}
        options["ca_data"] = _decoded(secret, "ca.crt")
    return connect(f"{'https' if tls else 'http'}://{api_host(name, namespace)}:{API_PORT}", dial=dial, **options)


def head_pod(cluster: Cluster, job: Raw) -> str:
    """The running pod of the newest head that is not being deleted. NotReady says why there is none."""
    metadata = job["metadata"]
    heads = cluster.objects("Pod", namespace=metadata["namespace"], labels=f"{JOB_UID}={metadata['uid']},{ROLE}={HEAD}")
    live = [
        pod
        for pod in heads
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    doctor = f"see `cormorant doctor {metadata['name']}{cluster.options_of(job)}`"
    if live:
        head = max(live, key=lambda pod: int(pod["metadata"]["labels"].get(EPOCH) or 0))
        if head["status"].get("phase") != "Running":
            raise NotReady(f"the head of {identity(job)} is not running yet (pod {head['metadata']['name']}); {doctor}")
        return str(head["metadata"]["name"])
    for kind in ("Completed", "Failed", "Suspended"):
        if holds(job, kind):
            kind_of_error = NotReady if kind == "Suspended" else HeadGone
            raise kind_of_error(f"{identity(job)} no longer has a head: the job is {kind}")
    phase = (job.get("status") or {}).get("phase")
    reason = f"its last status says {phase}" if phase else "no operator has reconciled the job yet"
    raise NotReady(f"{identity(job)} has no head: {reason}; {doctor}")


def _token_of(cluster: Cluster, job: Raw, role: "Role") -> str:
    """The token of a role, from the job's Secret."""
    namespace, name = job["metadata"]["namespace"], tokens_secret(job["metadata"]["name"])
    try:
        secret = cluster.get("Secret", name, namespace=namespace)
    except NotAllowed as error:
        raise NotAllowed(f"{error}; alternatively, give the token with --token-file") from error
    except ObjectMissing as error:
        raise NotReady(
            f"Secret {name} with the job's tokens not found in namespace {namespace}; the operator creates it: "
            f"is it running (`cormorant doctor{cluster.options_of(job)}`)?"
        ) from error
    if token := _decoded(secret, role):
        return token
    raise CommandFailed(
        f"Secret {name} of namespace {namespace} has no token for role {role}; delete it, and the operator "
        "recreates it within six minutes"
    )


def _decoded(secret: Raw, key: str) -> str | None:
    return base64.b64decode((secret.get("data") or {}).get(key) or "").decode(errors="replace") or None
