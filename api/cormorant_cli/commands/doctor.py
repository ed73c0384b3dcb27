"""`cormorant doctor [JOB]`: finds problems of a cluster and a job. Changes nothing.

The operator's conditions are the diagnosis of a job. This adds what the operator cannot report: that none runs or
that it has not seen the newest spec.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from cormorant_cli.cluster import Cluster, Raw, condition, connected, holds, identity, is_current, why
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import NotAllowed, ObjectMissing
from cormorant_cli.printing import tell

Level = Literal["ok", "note", "problem"]
_MARKS = {"ok": "ok  ", "note": "note", "problem": "BAD "}
OPERATOR = "app.kubernetes.io/part-of=cormorant,app.kubernetes.io/component=operator"
_TROUBLE = {
    "Accepted": "False",
    "Scheduled": "False",
    "Ready": "False",
    "Progressing": "Unknown",
    "Stalled": "True",
    "Suspended": "True",
    "Failed": "True",
}
"""The status that makes a condition a problem."""
_PASSING = ("PodsPending", "HeadNotReady", "TooFewWorkers")
"""Reasons that every start and every resize shows for a while."""
_GOOD = ("Accepted", "AllPodsScheduled", "EnoughWorkers", "FramesCollected", "AllFramesDelivered")
_QUIET = ("NotWanted", "UpToDate", "NotStalled", "NotPaused", "NotSuspended")
_REMEDIES = {
    "Forbidden": "see rbac in the chart's values",
    "ImagePull": "check the image's name and whether the nodes may pull it (imagePullSecrets)",
    "Unschedulable": "lower resources.requests, add nodes, or change the template's nodeSelector or tolerations",
    "QuotaExceeded": "raise the ResourceQuota or request less",
    "ControlPlaneUnreachable": "does a NetworkPolicy block it?",
    "Suspended": "set spec.suspend to false to continue",
    "Spec": "`cormorant resume` ends it",
}


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    sentence: str


def doctor(
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="Job to diagnose; without it, only the cluster is checked.")
    ] = "",
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Diagnose a cluster and a job. Exits with 1 if there is a problem."""
    with connected(context) as cluster:
        findings = list(_examine(cluster, job, namespace or cluster.namespace))
    problems = [finding for finding in findings if finding.level == "problem"]
    lines = (f"{_MARKS[finding.level]}  {finding.sentence}" for finding in findings)
    tell({"healthy": not problems, "findings": findings}, *lines)
    if problems:
        raise typer.Exit(1)


def _examine(cluster: Cluster, name: str, namespace: str) -> Iterator[Finding]:
    """All findings, the cluster's first. `name`: name of a job; empty: only the cluster."""
    yield Finding("ok", f"the API server {cluster.server} answers (Kubernetes {cluster.version()})")
    job = None
    try:
        if name:
            job = cluster.get("CollectorJob", name, namespace=namespace)
        else:
            cluster.objects("CollectorJob", namespace=namespace)
    except ObjectMissing as error:  # the job, its namespace, or the CRD
        yield Finding("problem", str(error))
        return
    try:
        yield from of_operators(cluster.objects("Deployment", labels=OPERATOR))
    except NotAllowed as error:
        yield Finding("note", f"cannot check the operator's Deployment: {error}")
    if job is not None:
        yield from of_job(job)


def of_operators(deployments: Sequence[Raw]) -> Iterator[Finding]:
    """Whether operators run; of the namespaces that they watch, a job without a status tells."""
    for deployment in deployments:
        name, metadata = identity(deployment), deployment["metadata"]
        wanted = deployment["spec"].get("replicas", 1)
        ready = (deployment.get("status") or {}).get("readyReplicas") or 0
        kubectl = f"kubectl -n {metadata['namespace']}"
        if not wanted:
            scale = f"{kubectl} scale deployment {metadata['name']} --replicas=1"
            yield Finding("problem", f"the operator {name} is scaled to 0; {scale}")
        elif ready:
            yield Finding("ok", f"the operator {name} is running ({ready} of {wanted} replicas ready)")
        else:
            failed = condition(deployment, "ReplicaFailure").get("message") or "no replica is ready"
            sentence = (
                f"the operator {name} is not running: {failed}; see `{kubectl} describe pods -l "
                f"app.kubernetes.io/component=operator` and `{kubectl} logs deployment/{metadata['name']}`"
            )
            yield Finding("problem", sentence)
    if not deployments:
        sentence = (
            "the operator is not installed: no Deployment has the label app.kubernetes.io/component=operator; install "
            "it: helm install cormorant charts/cormorant"
        )
        yield Finding("problem", sentence)


def of_job(job: Raw) -> Iterator[Finding]:
    """The operator's findings about a job."""
    name, metadata = identity(job), job["metadata"]
    if "deletionTimestamp" in metadata:
        yield Finding("problem", f"{name} is being deleted")
    status = job.get("status")
    if not status:
        sentence = (
            f"no operator has reconciled {name} since its creation at {metadata['creationTimestamp']}: it has no "
            "status; does the operator watch its namespace (watchNamespaces of the chart)?"
        )
        yield Finding("problem", sentence)
        return
    if not is_current(job) and not holds(job, "Completed") and not holds(job, "Failed"):
        sentence = (
            f"the operator has not reconciled the newest spec of {name}: the status belongs to an older generation"
        )
        yield Finding("problem", sentence)
    for fact in status.get("conditions") or ():
        kind, reason = fact["type"], fact["reason"]
        if reason in _QUIET:
            continue
        is_bad = fact["status"] == _TROUBLE.get(kind) and reason not in _PASSING
        level: Level = "problem" if is_bad else "ok" if reason in _GOOD else "note"
        sentence = f"{kind}={fact['status']}, {why(fact)}"
        if level != "ok" and reason in _REMEDIES:
            sentence += f"; {_REMEDIES[reason]}"
        yield Finding(level, sentence)
    failures = status.get("recentFailures") or ()
    if failures:
        last = failures[-1]
        code = f", exit code {last['exitCode']}" if last.get("exitCode") is not None else ""
        words = f": {last['message']}" if last.get("message") else ""
        counted = f"{len(failures)} pods failed, most recently {last['pod']} at {last['time']}"
        yield Finding("note", f"{counted}: {last['reason']}{code}{words}")
