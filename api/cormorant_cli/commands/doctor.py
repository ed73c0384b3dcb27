"""`cormorant doctor [JOB]`: looks at a cluster and a job, and says what is wrong. Changes nothing."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

import typer

from cormorant_cli.cluster import Cluster, Raw, connected
from cormorant_cli.connection import Connection, Context, Namespace
from cormorant_cli.diagnosis import Finding, of_job, of_operators
from cormorant_cli.errors import CliError, ClusterAway, NoHead, NotAllowed, ObjectMissing
from cormorant_cli.jobs import condition, identity
from cormorant_contract.job import GROUP
from cormorant_contract.schema import PLURAL

T = TypeVar("T")

_OPERATOR = "app.kubernetes.io/name=cormorant,app.kubernetes.io/component=operator"
_RIGHTS: tuple[tuple[str, str, str, str, str], ...] = (
    # verb, resource, subresource, API group, what needs it
    ("create", PLURAL, "", GROUP, "`cormorant submit`"),
    ("patch", PLURAL, "", GROUP, "`cormorant submit` and `cormorant pause`"),
    ("create", "configmaps", "", "", "`cormorant submit --code`"),
    ("get", "secrets", "", "", "`cormorant weights` and every command that connects to a head"),
    ("list", "pods", "", "", "`cormorant weights` and every command that connects to a head"),
    ("get", "pods", "portforward", "", "`cormorant weights` and every command that connects to a head"),
)
_MARKS = {"ok": "ok  ", "note": "note", "problem": "BAD "}
_NO_CRD = (
    "the CustomResourceDefinition of CollectorJob is not installed; install the operator: "
    "helm install cormorant charts/cormorant"
)


def doctor(
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="Job to diagnose; without it, only the cluster is checked.")
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
    output: Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="Output format.")] = "table",
) -> None:
    """Diagnose a cluster and a job. Exits with 1 if there is a problem."""
    with connected(context) as cluster:
        findings = list(examine(cluster, job, namespace or cluster.namespace))
    problems = [finding for finding in findings if finding.level == "problem"]
    if output == "json":
        typer.echo(
            json.dumps({"healthy": not problems, "findings": [asdict(finding) for finding in findings]}, indent=2)
        )
    else:
        for finding in findings:
            typer.echo(f"{_MARKS[finding.level]}  {finding.sentence}")
    if problems:
        raise typer.Exit(1)


def examine(cluster: Cluster, name: str, namespace: str) -> Iterator[Finding]:
    """Every finding, the cluster's first. `name`: of a job; empty: none is asked about."""
    gaps: list[Finding] = []

    def read(ask: Callable[[], T], what: str) -> T | None:
        """The answer; None where the user may not have it."""
        try:
            return ask()
        except (ClusterAway, ObjectMissing):
            raise
        except CliError as error:
            gaps.append(Finding("note", f"cannot check {what}: {error}"))
            return None

    yield Finding("ok", f"the API server {cluster.server} answers (Kubernetes {cluster.version()})")
    try:
        read(lambda: cluster.get("Namespace", namespace), f"namespace {namespace}")
    except ObjectMissing as error:
        yield Finding("problem", f"{error}; create it: kubectl create namespace {namespace}")
        return
    try:
        crd = read(lambda: cluster.get("CustomResourceDefinition", f"{PLURAL}.{GROUP}"), "the CRD of CollectorJob")
    except ObjectMissing:
        yield Finding("problem", _NO_CRD)
        return
    if crd is not None:
        yield _of_crd(crd)
    job, missing = None, ""
    if name:
        try:
            job = cluster.get("CollectorJob", name, namespace=namespace)
        except ObjectMissing as error:
            missing = str(error)
    operators = read(lambda: cluster.objects("Deployment", labels=_OPERATOR), "the operator's Deployment")
    found = [] if operators is None else list(of_operators(operators, job, namespace=namespace))
    yield from found
    yield from read(lambda: list(_lacking(cluster, namespace)), "your permissions") or ()
    if missing:
        yield Finding("problem", missing)
    if job is not None:
        is_kept = not any(finding.level == "problem" for finding in found)
        yield from of_job(job, now=datetime.now(UTC), options=cluster.options_of(job), is_kept=is_kept)
        code = (job["spec"].get("code") or {}).get("configMap")
        try:
            if code:
                read(lambda: cluster.get("ConfigMap", code, namespace=namespace), f"ConfigMap {code}")
        except ObjectMissing:
            # It keeps pods in ContainerCreating, which no condition explains.
            sentence = (
                f"the ConfigMap {code} with its code does not exist, and pods wait for it; submit the job again with "
                "--code, or create the ConfigMap"
            )
            yield Finding("problem", sentence)
        yield from _of_head(cluster, job)
    yield from gaps


def _of_crd(crd: Raw) -> Finding:
    established = condition(crd, "Established")
    if established.get("status") == "True":
        return Finding("ok", "the CustomResourceDefinition of CollectorJob is served")
    reason = condition(crd, "NamesAccepted").get("message") or established.get("message") or "not established yet"
    return Finding("problem", f"the CustomResourceDefinition of CollectorJob is not served: {reason}")


def _lacking(cluster: Cluster, namespace: str) -> Iterator[Finding]:
    for verb, resource, subresource, group, purpose in _RIGHTS:
        if not cluster.may(verb, resource, namespace=namespace, group=group, subresource=subresource):
            right = f"{verb} {resource}{f'/{subresource}' if subresource else ''}"
            sentence = f"you may not {right} in namespace {namespace}, which {purpose} needs; ask for that permission"
            yield Finding("problem", sentence)


def _of_head(cluster: Cluster, job: Raw) -> Iterator[Finding]:
    """Whether this user's commands reach the head: the operator asks it on another way, with another token."""
    connection = Connection(url="", token="", token_file="", job=job["metadata"]["name"])
    try:
        with connection.client_in(cluster, job, "read") as client:
            client.status()
    except (NoHead, NotAllowed):
        return  # said by the conditions, and by the missing permissions
    except CliError as error:
        yield Finding("problem", str(error))
    else:
        yield Finding("ok", f"the head of {identity(job)} answers and accepts the job's token")
