"""`cormorant doctor [JOB]`: finds problems of a cluster and a job. Changes nothing.

The operator's conditions are the diagnosis of a job. This adds what the operator cannot report: that none runs or
that it has not seen the newest spec; and a remedy for each reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from cormorant_cli.cluster import Cluster, Raw, condition, connected, holds, identity, is_current, why
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import NotAllowed, ObjectMissing
from cormorant_cli.printing import tell
from cormorant_contract.children import JOB

Level = Literal["ok", "note", "problem"]
_MARKS = {"ok": "ok  ", "note": "note", "problem": "BAD "}
OPERATOR = "app.kubernetes.io/part-of=cormorant,app.kubernetes.io/component=operator"
_SEEN_WITHIN_S = 15
"""A running operator has written a new job's first status by then."""
_WRITTEN_WITHIN_S = 60
"""An operator keeps a status that was written so lately; an older one may be of an operator that is gone."""
_AT_REST = ("Completed", "Failed", "Suspended", "Paused")
"""Conditions during which an operator has nothing to write."""
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
_DESCRIBE = "`kubectl describe pods -l {label}{options}` shows what the pods wait for"
_REMEDIES = {
    "Forbidden": "see rbac in the chart's values",
    "ImagePull": "check the image's name and whether the nodes may pull it (imagePullSecrets)",
    "Unschedulable": "lower resources.requests, add nodes, or change the template's nodeSelector or tolerations",
    "ContainerConfig": "create the object that the container refers to",
    "QuotaExceeded": "raise the ResourceQuota or request less",
    "HeadBlocked": "fix the cause, the operator retries every 2 min",
    "HeadNotReady": _DESCRIBE,
    "TooFewWorkers": _DESCRIBE,
    "ControlPlaneUnreachable": "does a NetworkPolicy block it?",
    "Suspended": "set spec.suspend to false to continue",
    "Spec": "`cormorant resume {name}{options}` ends it",
    "API": "`cormorant status {name}{options}` shows who holds it",
    "NoWorkers": "scale it up",
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
    now = datetime.now(UTC)
    try:
        yield from of_operators(cluster.objects("Deployment", labels=OPERATOR), job, namespace=namespace, now=now)
    except NotAllowed as error:
        yield Finding("note", f"cannot check the operator's Deployment: {error}")
    if job is not None:
        yield from of_job(job, now=now, options=cluster.options_of(job))


def of_operators(deployments: Sequence[Raw], job: Raw | None, *, namespace: str, now: datetime) -> Iterator[Finding]:
    """Whether an operator manages a namespace. `job`: its status shows whether one runs outside the cluster."""
    # Namespaces that each operator's arguments name; none: all.
    watched = {
        identity(deployment): {
            str(word).partition("=")[2]
            for container in deployment["spec"]["template"]["spec"]["containers"]
            for word in container.get("args") or ()
            if str(word).startswith("--namespace=")
        }
        for deployment in deployments
    }
    near = [one for one in deployments if not watched[identity(one)] or namespace in watched[identity(one)]]
    for deployment in near:
        yield _of_operator(deployment)
    if near:
        return
    names = ", ".join(sorted(set().union(*watched.values())))
    writes = [entry for entry in (job or {}).get("metadata", {}).get("managedFields", ()) if "time" in entry]
    times = [datetime.fromisoformat(entry["time"]) for entry in writes if entry.get("subresource") == "status"]
    is_kept = any((now - time).total_seconds() <= _WRITTEN_WITHIN_S for time in times)
    is_at_rest = job is not None and any(holds(job, kind) for kind in _AT_REST)
    if job is not None and (is_kept or is_at_rest) and is_current(job):
        watch = f"the operators of the cluster watch only {names}" if names else "the cluster has no operator"
        if is_kept:
            sentence = f"{watch}, but the job's status is up to date: another one keeps it"
        else:
            sentence = f"{watch}; whether another one keeps the job's status does not show while the job rests"
        yield Finding("note", sentence)
    elif names:
        sentence = (
            f"the operator does not watch namespace {namespace}, only {names}; add it to watchNamespaces of the chart, "
            "or use one of these"
        )
        yield Finding("problem", sentence)
    else:
        sentence = (
            "the operator is not installed: no Deployment has the label app.kubernetes.io/component=operator; install "
            "it: helm install cormorant charts/cormorant"
        )
        yield Finding("problem", sentence)


def _of_operator(deployment: Raw) -> Finding:
    name, metadata = identity(deployment), deployment["metadata"]
    wanted = deployment["spec"].get("replicas", 1)
    ready = (deployment.get("status") or {}).get("readyReplicas") or 0
    kubectl = f"kubectl -n {metadata['namespace']}"
    if not wanted:
        sentence = f"the operator {name} is scaled to 0; {kubectl} scale deployment {metadata['name']} --replicas=1"
        return Finding("problem", sentence)
    if ready:
        return Finding("ok", f"the operator {name} is running ({ready} of {wanted} replicas ready)")
    failed = condition(deployment, "ReplicaFailure").get("message") or "no replica is ready"
    sentence = (
        f"the operator {name} is not running: {failed}; see `{kubectl} describe pods -l "
        f"app.kubernetes.io/component=operator` and `{kubectl} logs deployment/{metadata['name']}`"
    )
    return Finding("problem", sentence)


def of_job(job: Raw, *, now: datetime, options: str = "") -> Iterator[Finding]:
    """The operator's findings about a job. `options`: options that commands about the job need besides its name."""
    name, metadata = identity(job), job["metadata"]
    if "deletionTimestamp" in metadata:
        yield Finding("problem", f"{name} is being deleted")
    status = job.get("status")
    if not status:
        born = metadata["creationTimestamp"]
        if (now - datetime.fromisoformat(born)).total_seconds() <= _SEEN_WITHIN_S:
            yield Finding("note", f"{name} was just created and has no status yet")
            return
        sentence = f"no operator has reconciled {name} since its creation at {born}: it has no status"
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
            label = f"{JOB}={metadata['name']}"
            sentence += "; " + _REMEDIES[reason].format(name=metadata["name"], label=label, options=options)
        yield Finding(level, sentence)
    failures = status.get("recentFailures") or ()
    if failures:
        last = failures[-1]
        code = f", exit code {last['exitCode']}" if last.get("exitCode") is not None else ""
        words = f": {last['message']}" if last.get("message") else ""
        advice = "; raise the memory limit of its group" if last["reason"] == "OOMKilled" else ""
        counted = f"{len(failures)} pods failed, most recently {last['pod']} at {last['time']}"
        yield Finding("note", f"{counted}: {last['reason']}{code}{words}{advice}")
