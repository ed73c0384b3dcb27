"""Which head a command speaks to, and how it gets there: the one notion that all commands share.

    --url URL                        a head that can be reached: `cormorant run --serve`, an Ingress, a forwarded port
    JOB [-n NS] [--context CTX]      a job of a cluster: its head's pod by the API server, its token from the Secret

What goes wrong on the way becomes a sentence.
"""

import base64
import binascii
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cormorant_cli.errors import (
    BadInput,
    CommandFailed,
    HeadAway,
    HeadGone,
    NoHead,
    NotAllowed,
    NotReady,
    ObjectMissing,
)
from cormorant_contract.children import API_PORT, api_host, tls_secret, tokens_secret

if TYPE_CHECKING:
    from cormorant_cli.cluster import Cluster, Raw
    from cormorant_client import Client, ConnectOptions
    from cormorant_client.address import Role

_RECONNECT_S = 3.0
"""A person waits: a head that restarts is asked for again by the next command."""
TIMEOUT_S = 30.0
"""A head that says nothing for so long does not answer."""
_URL, _TOKEN, _TOKEN_FILE = "CORMORANT_URL", "CORMORANT_TOKEN", "CORMORANT_TOKEN_FILE"
_ROLES: "tuple[Role, ...]" = ("read", "write", "operator")

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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


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
        """A client with the token of a role; what goes wrong inside becomes a sentence.

        Raises:
            BadInput: the URL, the token or what shall be sent cannot be used.
            CommandFailed: the head refuses, or does not answer.
        """
        if not self.job:
            token = self._own_token(role)
            hint = "" if token else "; give --token or --token-file"
            with _client_of(self.url, token, hint=hint, ca_file=self.ca_file) as client:
                yield client
            return
        from cormorant_cli.cluster import connected

        with connected(self.context) as cluster:
            job = cluster.get("CollectorJob", self.job, namespace=self.namespace or cluster.namespace)
            with self.client_in(cluster, job, role) as client:
                yield client

    @contextmanager
    def client_in(
        self, cluster: "Cluster", job: "Raw", role: "Role", *, timeout_s: float = TIMEOUT_S
    ) -> Iterator["Client"]:
        from cormorant_cli.forward import forwarded
        from cormorant_cli.jobs import identity

        head = _head_of(cluster, job)
        # What the environment says is of a head without a cluster.
        is_own = _given(self.token, _TOKEN) or _given(self.token_file, _TOKEN_FILE)
        token = self._own_token(role) if is_own else token_of(cluster, job, role)
        secret = tokens_secret(job["metadata"]["name"])
        tls = tls_of(cluster, job)
        if tls and self.ca_file:
            tls = {"server_name": tls["server_name"], "ca_file": self.ca_file}
        open_stream = partial(cluster.open_port, head, API_PORT, namespace=job["metadata"]["namespace"])
        with forwarded(open_stream) as forwarder:
            hint = "" if is_own else f"; the token comes from Secret {secret}"
            try:
                url = f"{'https' if tls else 'http'}://127.0.0.1:{forwarder.port}"
                with _client_of(url, token, hint=hint, timeout_s=timeout_s, **tls) as client:
                    yield client
            except HeadAway as error:
                reason = forwarder.error or str(error)
                raise HeadAway(
                    f"the head of {identity(job)} (pod {head}) does not answer through the API server: {reason}"
                ) from error

    def _own_token(self, role: "Role") -> str:
        if self.token or not self.token_file:
            return self.token
        from cormorant_client import BadAddress
        from cormorant_client.address import read_token

        try:
            return read_token(self.token_file, role)
        except BadAddress as error:
            raise BadInput(str(error)) from error


@contextmanager
def reached(name: str, *, namespace: str, context: str, token: str | None) -> "Iterator[tuple[str, ConnectOptions]]":
    """The URL at which a program reaches the head of a job while this is open, and options of `connect`. A head that is
    replaced is found again.

    Raises:
        CliError: there is no such job, it has no head, or the user may not see it.
    """
    from cormorant_cli.cluster import connected
    from cormorant_cli.forward import forwarded

    with connected(context) as cluster:
        job = cluster.get("CollectorJob", name, namespace=namespace or cluster.namespace)
        place = job["metadata"]["namespace"]
        _head_of(cluster, job)  # says what is missing
        tls = tls_of(cluster, job)
        token = token or token_of(cluster, job, "write")
        with forwarded(lambda: cluster.open_port(_head_of(cluster, job), API_PORT, namespace=place)) as forwarder:
            options: ConnectOptions = {"token": token}
            if tls:
                options |= {"server_name": tls["server_name"], "ca_data": tls["ca_data"]}
            yield f"{'https' if tls else 'http'}://127.0.0.1:{forwarder.port}", options


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which head it speaks to; it gets them as `connection`."""
    given = inspect.signature(command)
    options = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default="", annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    expanded = [*(known for name, known in given.parameters.items() if name != "connection"), *options]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(connection=Connection(**{name: values.pop(name) for name in _OPTIONS}), **values)

    run.__signature__ = given.replace(parameters=expanded)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {one.name: one.annotation for one in expanded}
    return run


def token_of(cluster: "Cluster", job: "Raw", role: "Role") -> str:
    """The token of a role, or of the next higher one, from the job's Secret.

    Raises:
        CommandFailed: the user may not read it, or it is not there.
    """
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
    for candidate in _ROLES[_ROLES.index(role) :]:
        if token := _decoded(secret, candidate):
            return token
    raise CommandFailed(
        f"Secret {name} of namespace {namespace} has no token for role {role}; delete it, and the operator "
        "recreates it within six minutes"
    )


def tls_of(cluster: "Cluster", job: "Raw") -> dict[str, str]:
    """How a job's head is verified: nothing for one that speaks HTTP.

    The authority is ca.crt of the job's Secret; for one without it, or that the user may not read, the system's.
    """
    tls = ((job["spec"].get("head") or {}).get("tls")) or {}
    if not tls:
        return {}
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    try:
        secret = cluster.get("Secret", tls.get("secretName") or tls_secret(name), namespace=namespace)
    except (NotAllowed, ObjectMissing):
        secret = {}
    return {"server_name": api_host(name, namespace), "ca_data": _decoded(secret, "ca.crt")}


def _decoded(secret: "Raw", key: str) -> str:
    try:
        return base64.b64decode((secret.get("data") or {}).get(key) or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _head_of(cluster: "Cluster", job: "Raw") -> str:
    from cormorant_cli.jobs import holds, identity, live_head, why_waiting

    head = live_head(cluster, job)
    if head is not None and head["status"].get("phase") == "Running":
        return str(head["metadata"]["name"])
    phase, options = (job.get("status") or {}).get("phase", ""), cluster.options_of(job)
    if head is not None:
        reason = why_waiting(head) or "its container has not started"
        raise NoHead(f"the head of {identity(job)} is not running yet (pod {head['metadata']['name']}): {reason}")
    for kind in ("Completed", "Failed", "Suspended"):
        if holds(job, kind):
            uri = ((job["spec"].get("output") or {}).get("dataset") or {}).get("uri", "")
            results = f"; its results are in {uri}" if uri else ""
            kind_of_error = NoHead if kind == "Suspended" else HeadGone
            raise kind_of_error(f"{identity(job)} no longer has a head: the job is {kind}{results}")
    if not phase:
        raise NoHead(
            f"{identity(job)} has no head: no operator has reconciled the job yet (see `cormorant doctor{options}`)"
        )
    doctor = f"cormorant doctor {job['metadata']['name']}{options}"
    if phase in ("Running", "Degraded", "Paused", "Completing"):
        raise NoHead(
            f"{identity(job)} has no head, but its last status says {phase}: no operator has replaced the head; see "
            f"`{doctor}`"
        )
    raise NoHead(f"{identity(job)} has no head yet: it is {phase}; see `{doctor}`")


@contextmanager
def _client_of(url: str, token: str, *, hint: str, **options: Any) -> Iterator["Client"]:
    """`options`: ca_file, ca_data, server_name and timeout_s of `connect`."""
    from cormorant_client import BadAddress, BadTensors, ClientError, HeadUnreachable, NotNow, Unauthenticated, connect

    try:
        with connect(url, token=token, reconnect_s=_RECONNECT_S, **options) as client:
            yield client
    except (BadAddress, BadTensors) as error:
        raise BadInput(str(error)) from error
    except Unauthenticated as error:
        raise CommandFailed(f"{error}{hint}") from error
    except NotNow as error:
        raise NotReady(str(error)) from error
    except HeadUnreachable as error:
        raise HeadAway(str(error)) from error
    except ClientError as error:
        raise CommandFailed(str(error)) from error


def _given(value: str, variable: str) -> bool:
    """Whether the user wrote a value, and not only the environment."""
    return bool(value) and value != os.environ.get(variable, "")
