"""What is wrong with an operator or with a job, as sentences. Pure: objects in, findings out; `doctor.py` reads them.

The operator's conditions are the diagnosis of a job. Added here is what no operator can write: that none runs, that it
has not seen the newest spec, and what to do about a reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from cormorant_cli.cluster import Raw
from cormorant_cli.jobs import age, condition, holds, identity, is_current, why
from cormorant_contract.children import JOB

Level = Literal["ok", "note", "problem"]
_SEEN_WITHIN_S = 15
"""An operator that runs has written a new job's first status by then."""
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
"""Reasons of every start and every new size."""
_GOOD = ("Accepted", "AllPodsScheduled", "EnoughWorkers", "FramesCollected", "AllFramesDelivered")
_QUIET = ("NotWanted", "UpToDate", "NotStalled", "NotPaused", "NotSuspended")
_REMEDIES = {
    "Forbidden": "see rbac in the chart's values",
    "ImagePull": "check the image's name and whether the nodes may pull it (imagePullSecrets)",
    "Unschedulable": "lower resources.requests, add nodes, or change the template's nodeSelector or tolerations",
    "ContainerConfig": "create the object that the container refers to",
    "QuotaExceeded": "raise the ResourceQuota or request less",
    "HeadBlocked": "fix the cause, the operator retries every 2 min",
    "HeadNotReady": "`kubectl describe pods -l {label}{options}` shows what the pods wait for",
    "TooFewWorkers": "`kubectl describe pods -l {label}{options}` shows what the pods wait for",
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


def of_operators(deployments: Sequence[Raw], job: Raw | None, *, namespace: str) -> Iterator[Finding]:
    """Whether an operator looks after a namespace. `job`: its status shows whether one runs outside of the cluster."""
    is_kept = job is not None and bool(job.get("status")) and is_current(job)
    watched = {identity(deployment): _watched(deployment) for deployment in deployments}
    near = [one for one in deployments if not watched[identity(one)] or namespace in watched[identity(one)]]
    for deployment in near:
        yield _of_operator(deployment)
    if near:
        return
    names = ", ".join(sorted(set().union(*watched.values())))
    if is_kept:
        watch = f"the operators of the cluster watch only {names}" if names else "the cluster has no operator"
        yield Finding("note", f"{watch}, but the job's status is up to date: another one keeps it")
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


def of_job(job: Raw, *, now: datetime, options: str = "", is_kept: bool = True) -> Iterator[Finding]:
    """What the operator says of a job.

    Args:
        options: what a command about it must say beside its name.
        is_kept: an operator runs and updates the status. Without one it may be old, and nothing in it counts as "ok".
    """
    name, metadata = identity(job), job["metadata"]
    if "deletionTimestamp" in metadata:
        yield Finding("problem", f"{name} is being deleted")
    status = job.get("status")
    if not status:
        born = metadata["creationTimestamp"]
        if (now - datetime.fromisoformat(born)).total_seconds() <= _SEEN_WITHIN_S:
            yield Finding("note", f"{name} was just created and has no status yet")
            return
        sentence = f"no operator has reconciled {name} since its creation {age(born, now)} ago: it has no status"
        yield Finding("problem", sentence)
        return
    if not is_current(job) and not holds(job, "Completed") and not holds(job, "Failed"):
        sentence = (
            f"the operator has not reconciled the newest spec of {name}: the status belongs to an older generation"
        )
        yield Finding("problem", sentence)
    if not is_kept and not holds(job, "Completed") and not holds(job, "Failed"):
        moved = (status.get("frames") or {}).get("lastProgressTime")
        when = f"; frames were counted last {age(moved, now)} ago" if moved else ""
        yield Finding("note", f"no operator keeps the status of {name}: its conditions may be of the past{when}")
    for fact in status.get("conditions") or ():
        if fact["reason"] not in _QUIET:
            found = _of_condition(fact, job, options)
            yield found if is_kept or found.level == "problem" else Finding("note", found.sentence)
    failures = status.get("recentFailures") or ()
    if failures:
        last = failures[-1]
        code = f", exit code {last['exitCode']}" if last.get("exitCode") is not None else ""
        words = f": {last['message']}" if last.get("message") else ""
        advice = "; raise the memory limit of its group" if last["reason"] == "OOMKilled" else ""
        counted = f"{len(failures)} pods failed, most recently {last['pod']} {age(last['time'], now)} ago"
        yield Finding("note", f"{counted}: {last['reason']}{code}{words}{advice}")


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


def _watched(deployment: Raw) -> set[str]:
    """Namespaces that an operator's arguments name; empty: all."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    arguments = [str(word) for container in containers for word in container.get("args") or ()]
    return {word.partition("=")[2] for word in arguments if word.startswith("--namespace=")}


def _of_condition(fact: Raw, job: Raw, options: str) -> Finding:
    kind, status, reason, name = fact["type"], fact["status"], fact["reason"], job["metadata"]["name"]
    if status == _TROUBLE.get(kind) and reason not in _PASSING:
        level: Level = "problem"
    else:
        level = "ok" if reason in _GOOD else "note"
    sentence = f"{kind}={status}, {why(fact)}"
    if level != "ok" and reason in _REMEDIES:
        sentence += "; " + _REMEDIES[reason].format(name=name, label=f"{JOB}={name}", options=options)
    return Finding(level, sentence)
