"""`cormorant doctor [JOB]`: looks at a cluster and a job, and says what is wrong. Changes nothing."""

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

import typer

from cormorant_cli.cluster import Cluster, Kind, Raw, connected
from cormorant_cli.commands.describe import events_of
from cormorant_cli.connection import Connection, Context, Namespace
from cormorant_cli.diagnosis import ClusterFacts, Finding, JobFacts, examine_cluster, examine_job
from cormorant_cli.errors import CliError, ClusterAway, CommandFailed, NoHead, ObjectMissing
from cormorant_cli.jobs import live_head, pods_of, read_pod
from cormorant_contract.children import tokens_secret
from cormorant_contract.job import GROUP
from cormorant_contract.schema import PLURAL

T = TypeVar("T")

_OPERATOR = "app.kubernetes.io/name=cormorant,app.kubernetes.io/component=operator"
_RIGHTS: tuple[tuple[str, str, str, str, str], ...] = (
    # verb, resource, subresource, API group, what needs it
    ("create", PLURAL, "", GROUP, "`cormorant submit`"),
    ("patch", PLURAL, "", GROUP, "`cormorant pause`"),
    ("patch", PLURAL, "scale", GROUP, "`cormorant scale`"),
    ("delete", PLURAL, "", GROUP, "`cormorant delete`"),
    ("create", "configmaps", "", "", "`cormorant submit --code`"),
    ("get", "secrets", "", "", "`cormorant weights` and every command that connects to a head"),
    ("get", "pods", "portforward", "", "`cormorant weights` and every command that connects to a head"),
    ("list", "pods", "", "", "`cormorant describe`"),
    ("get", "pods", "log", "", "`cormorant logs`"),
)
_MARKS = {"ok": "ok  ", "note": "note", "problem": "BAD "}


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
        where = namespace or cluster.namespace
        version = cluster.version()
        of_job = None
        missing = ""
        if job:
            try:
                of_job = read_job(cluster, cluster.get("CollectorJob", job, namespace=where))
            except ObjectMissing as error:
                missing = str(error)
        of_cluster = read_cluster(cluster, where, version)
        findings = list(examine_cluster(of_cluster, of_job))
        if of_job is not None:
            findings += examine_job(of_job)
        elif missing and of_cluster.crd != {} and of_cluster.has_namespace:
            findings.append(Finding(level="problem", sentence=missing))
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


class _Reader:
    """Reads what the user may; what cannot be read becomes a sentence."""

    def __init__(self) -> None:
        self.gaps: list[str] = []

    def read(self, ask: Callable[[], T], what: str) -> T | None:
        """The answer, or None and a gap."""
        try:
            return ask()
        except ClusterAway:
            raise
        except CliError as error:
            self.gaps.append(f"cannot check {what}: {error}")
            return None

    def read_one(self, cluster: Cluster, kind: Kind, name: str, namespace: str = "") -> Raw | Literal["missing"] | None:
        """An object, "missing", or None and a gap."""
        found = self.read(lambda: cluster.find(kind, name, namespace=namespace) or "missing", f"{kind} {name}")
        return found if found == "missing" else found or None  # type: ignore[return-value]  # the lambda's two types


def read_cluster(cluster: Cluster, namespace: str, version: str) -> ClusterFacts:
    reader = _Reader()
    crd = reader.read_one(cluster, "CustomResourceDefinition", f"{PLURAL}.{GROUP}")
    operators = reader.read(lambda: cluster.objects("Deployment", labels=_OPERATOR), "the operator's Deployment")
    pods = reader.read(lambda: cluster.objects("Pod", labels=_OPERATOR), "the operator's pods") if operators else None
    nodes = reader.read(lambda: cluster.objects("Node"), "the nodes")
    place = reader.read_one(cluster, "Namespace", namespace)
    return ClusterFacts(
        server=cluster.server,
        version=version,
        namespace=namespace,
        has_namespace=place != "missing",
        crd={} if crd == "missing" else crd,
        operators=operators,
        operator_pods=[read_pod(pod) for pod in pods] if pods is not None else None,
        nodes=nodes,
        lacking=_lacking(cluster, namespace, reader),
        gaps=tuple(reader.gaps),
    )


def read_job(cluster: Cluster, job: Raw) -> JobFacts:
    reader = _Reader()
    spec, metadata = job["spec"], job["metadata"]
    namespace = metadata["namespace"]
    pods = reader.read(lambda: pods_of(cluster, job), "its pods")
    events = reader.read(lambda: events_of(cluster, job, pods or ()), "its events")
    code = (spec.get("code") or {}).get("configMap")
    has_code = reader.read_one(cluster, "ConfigMap", code, namespace) if code else None
    claim = ((spec.get("head") or {}).get("persistence") or {}).get("claimName")
    found_claim = reader.read_one(cluster, "PersistentVolumeClaim", claim, namespace) if claim else None
    secret = reader.read_one(cluster, "Secret", tokens_secret(metadata["name"]), namespace)
    head = live_head(pods or ())
    return JobFacts(
        job=job,
        now=datetime.now(UTC),
        pods=pods,
        events=events,
        has_code=None if has_code is None else has_code != "missing",
        claim=found_claim,
        secret=secret,
        workloads=_workloads(cluster, job) if spec.get("suspend") else None,
        head_answer=_ask_head(cluster, job) if head is not None and head.has_started and secret else None,
        gaps=tuple(reader.gaps),
        options=cluster.options_of(job),
    )


def _lacking(cluster: Cluster, namespace: str, reader: _Reader) -> dict[str, str]:
    lacking: dict[str, str] = {}
    for verb, resource, subresource, group, purpose in _RIGHTS:
        name = f"{verb} {resource}{f'/{subresource}' if subresource else ''}"
        allowed = reader.read(
            lambda verb=verb, resource=resource, group=group, subresource=subresource: cluster.may(  # type: ignore[misc]  # bound now, not at the call
                verb, resource, namespace=namespace, group=group, subresource=subresource
            ),
            f"whether you may {name}",
        )
        if allowed is False:
            lacking[name] = purpose
    return lacking


def _workloads(cluster: Cluster, job: Raw) -> list[Raw] | None:
    """Kueue's records of a job; None where there is no Kueue, or the user may not see them."""
    try:
        found = cluster.objects("Workload", namespace=job["metadata"]["namespace"])
    except CommandFailed:
        return None
    uid = job["metadata"]["uid"]
    return [load for load in found if any(o.get("uid") == uid for o in load["metadata"].get("ownerReferences") or ())]


def _ask_head(cluster: Cluster, job: Raw) -> str | None:
    """Empty when the head answers with the job's token; why not, otherwise; None when there is none."""
    connection = Connection(url="", token="", token_file="", job=job["metadata"]["name"])
    try:
        with connection.client_in(cluster, job, "read") as client:
            client.status()
    except NoHead:
        return None
    except CliError as error:
        return str(error)
    return ""
