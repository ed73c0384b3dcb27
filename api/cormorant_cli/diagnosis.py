"""What is wrong with a cluster or with a job, as sentences. Pure: facts in, findings out; `doctor.py` reads the facts.

A fact that could not be read is None and says nothing here: why it could not is a finding of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from cormorant_cli.cluster import Raw
from cormorant_cli.jobs import (
    JobPod,
    age,
    condition,
    holds,
    identity,
    is_current,
    live_head,
    read_time,
    why,
    why_waiting,
)
from cormorant_contract.children import QUEUE, tokens_secret

Level = Literal["ok", "note", "problem"]
GPU = "nvidia.com/gpu"
_ROLES = ("read", "write", "operator", "ray")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_MOUNTING = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
_SEEN_WITHIN_S = 15
"""An operator that runs has written a new job's first status by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    level: Level
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    server: str
    version: str
    namespace: str
    """The one that the user asks about."""
    has_namespace: bool = True
    crd: Raw | None = None
    operators: Sequence[Raw] | None = None
    """Deployments of the operator in all namespaces."""
    operator_pods: Sequence[JobPod] | None = None
    nodes: Sequence[Raw] | None = None
    lacking: Mapping[str, str] = field(default_factory=dict)
    """What the user may not do, to what it is for."""
    gaps: tuple[str, ...] = ()
    """What could not be read, as sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    job: Raw
    now: datetime
    pods: Sequence[JobPod] | None = None
    events: Sequence[Raw] | None = None
    has_code: bool | None = None
    """Whether the ConfigMap of spec.code is there."""
    claim: Raw | Literal["missing"] | None = None
    """The head's PersistentVolumeClaim."""
    secret: Raw | Literal["missing"] | None = None
    workloads: Sequence[Raw] | None = None
    """Kueue's, of this job."""
    head_answer: str | None = None
    """Empty: the head answered through the API server. Otherwise why it did not."""
    gaps: tuple[str, ...] = ()
    options: str = ""
    """What a command about the job must say beside its name."""


# -- the cluster -------------------------------------------------------------------------------------------------


def examine_cluster(facts: ClusterFacts, job: JobFacts | None = None) -> Iterator[Finding]:
    """What holds of a cluster. `job`: its status shows whether an operator runs outside of the cluster."""
    yield _ok(f"the API server {facts.server} answers (Kubernetes {facts.version})")
    if not facts.has_namespace:
        yield _problem(
            f"namespace {facts.namespace} does not exist; create it: kubectl create namespace {facts.namespace}"
        )
    yield from _of_crd(facts)
    yield from _of_operator(facts, job)
    yield from _of_nodes(facts, job)
    for right, purpose in facts.lacking.items():
        yield _problem(
            f"you may not {right} in namespace {facts.namespace}, which {purpose} needs; ask for that permission"
        )
    for gap in facts.gaps:
        yield _note(gap)


def _of_crd(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.crd is None:
        return
    if not facts.crd:
        yield _problem(
            "the CustomResourceDefinition of CollectorJob is not installed; install the operator: "
            "helm install cormorant charts/cormorant"
        )
        return
    established = condition(facts.crd, "Established")
    if established.get("status") != "True":
        names = condition(facts.crd, "NamesAccepted")
        reason = names.get("message") or established.get("message") or "not established yet"
        yield _problem(f"the CustomResourceDefinition of CollectorJob is not served: {reason}")
        return
    yield _ok("the CustomResourceDefinition of CollectorJob is served")


def _of_operator(facts: ClusterFacts, job: JobFacts | None) -> Iterator[Finding]:
    if facts.operators is None:
        return
    is_kept = job is not None and bool(job.job.get("status")) and is_current(job.job)
    if not facts.operators:
        if is_kept:
            yield _note(
                "no operator Deployment found in the cluster, but the job's status is up to date: the "
                "operator runs elsewhere"
            )
            return
        if facts.crd == {}:
            return  # what installs the one installs the other: it was said
        yield _problem(
            "the operator is not installed: no Deployment has the label app.kubernetes.io/component=operator; install "
            "it: helm install cormorant charts/cormorant"
        )
        return
    watched = {identity(deployment): _watched(deployment) for deployment in facts.operators}
    near = [d for d in facts.operators if not watched[identity(d)] or facts.namespace in watched[identity(d)]]
    for deployment in near:
        yield from _of_deployment(facts, deployment)
    if near:
        return
    shown = ", ".join(sorted({name for names in watched.values() for name in names}))
    if is_kept:
        yield _note(f"the operator in the cluster watches only {shown}; another operator keeps the job's status")
        return
    yield _problem(
        f"the operator does not watch namespace {facts.namespace}, only {shown}; add it to watchNamespaces of the "
        "chart, or use one of these"
    )


def _of_deployment(facts: ClusterFacts, deployment: Raw) -> Iterator[Finding]:
    name = identity(deployment)
    wanted = (deployment.get("spec") or {}).get("replicas", 1)
    ready = (deployment.get("status") or {}).get("readyReplicas") or 0
    if not wanted:
        yield _problem(
            f"the operator {name} is scaled to 0; kubectl scale deployment {name.partition('/')[2]} --replicas=1"
        )
    elif ready:
        yield _ok(f"the operator {name} is running ({ready} of {wanted} replicas ready)")
    else:
        namespace = deployment["metadata"]["namespace"]
        pods = [pod for pod in facts.operator_pods or () if pod.raw["metadata"]["namespace"] == namespace]
        reasons = [f"{pod.name}: {_pod_trouble(pod)}" for pod in pods if _pod_trouble(pod)]
        failed = condition(deployment, "ReplicaFailure").get("message", "")
        why_not = "; ".join(reasons) or failed or "no replica is ready"
        log = f"kubectl logs -n {namespace} deployment/{deployment['metadata']['name']}"
        yield _problem(f"the operator {name} is not running: {why_not}; see {log}")


def _of_nodes(facts: ClusterFacts, job: JobFacts | None) -> Iterator[Finding]:
    if facts.nodes is None:
        return
    ready = [node for node in facts.nodes if condition(node, "Ready").get("status") == "True"]
    able = [node for node in ready if not (node.get("spec") or {}).get("unschedulable")]
    if not facts.nodes:
        yield _problem("the cluster has no nodes, so no pod can run")
    elif not able:
        yield _problem(f"none of {len(facts.nodes)} nodes is ready and schedulable: {_names_of(facts.nodes)}")
    else:
        yield _ok(f"{len(able)} of {len(facts.nodes)} nodes are ready and schedulable")
    gpus = {str(node["metadata"]["name"]): _gpus(node) for node in able}
    wanted = _wanted_gpus(job.job) if job is not None else {}
    most = max(gpus.values(), default=0)
    if wanted and not most:
        groups = ", ".join(wanted)
        yield _problem(
            f"no node offers {GPU}, which the groups {groups} request; add a node with a GPU and its device plugin, or "
            "set device: cpu"
        )
    elif (largest := max(wanted.values(), default=0)) > most:
        yield _problem(f"a worker requests {largest} {GPU}, and the largest node has {most}")
    elif able and not most:
        yield _note(f"no node offers {GPU}: groups with device: gpu will not start")
    elif most:
        yield _ok(f"{sum(gpus.values())} {GPU} on {sum(count > 0 for count in gpus.values())} nodes")


# -- a job -------------------------------------------------------------------------------------------------------


def examine_job(facts: JobFacts) -> Iterator[Finding]:
    found = [*_of_acceptance(facts), *_of_standstill(facts), *_of_belongings(facts)]
    found += [*_of_pods(facts), *_of_scheduling(facts, found), *_of_head(facts), *_of_course(facts)]
    yield from found
    if not any(finding.level == "problem" for finding in found):
        yield from _of_health(facts)
    for gap in facts.gaps:
        yield _note(gap)


def _of_acceptance(facts: JobFacts) -> Iterator[Finding]:
    job, name = facts.job, identity(facts.job)
    if "deletionTimestamp" in job["metadata"]:
        yield _problem(f"{name} is being deleted")
    if not job.get("status"):
        old_s = (facts.now - read_time(job["metadata"]["creationTimestamp"])).total_seconds()
        if old_s > _SEEN_WITHIN_S:
            yield _problem(
                f"no operator has reconciled {name} since its creation {age_of(job, facts.now)} ago: it has no status"
            )
        else:
            yield _note(f"{name} was just created and has no status yet")
        return
    if not is_current(job) and not holds(job, "Completed") and not holds(job, "Failed"):
        yield _problem(
            f"the operator has not reconciled the newest spec of {name}: the status belongs to an older generation"
        )
    accepted = condition(job, "Accepted")
    if accepted.get("status") == "False":
        hint = (
            "; the operator lacks a permission: see rbac in the chart's values"
            if accepted.get("reason") == "Forbidden"
            else ""
        )
        yield _problem(f"{name} was not accepted: {why(accepted)}{hint}")


def _of_standstill(facts: JobFacts) -> Iterator[Finding]:
    job, spec = facts.job, facts.job["spec"]
    queue = (job["metadata"].get("labels") or {}).get(QUEUE, "")
    if spec.get("suspend") and facts.workloads:
        # The operator deletes its own Workload of a suspended job: this one belongs to another controller.
        waits = [why(condition(load, "QuotaReserved")) for load in facts.workloads]
        words = next((text for text in waits if text), "Kueue has not answered yet")
        yield _problem(
            f"suspended by Kueue until {f'queue {queue}' if queue else 'the queue of its Workload'} has room: {words}"
        )
    elif spec.get("suspend"):
        yield _problem("suspended (spec.suspend is true) and without pods; set spec.suspend to false to continue")
    if holds(job, "Paused"):
        paused = condition(job, "Paused")
        ends = {
            "Spec": f"`cormorant resume {job['metadata']['name']}{facts.options}` ends it",
            "NoWorkers": "it has no workers; scale it up",
        }
        hint = ends.get(
            str(paused.get("reason")),
            f"a client holds a pause lease; see `cormorant status {job['metadata']['name']}{facts.options}`",
        )
        yield _note(f"paused: {hint}")


def _of_belongings(facts: JobFacts) -> Iterator[Finding]:
    spec, name = facts.job["spec"], facts.job["metadata"]["name"]
    if facts.has_code is False:
        yield _problem(
            f"the ConfigMap {spec['code']['configMap']} with its code does not exist, and pods wait for it; submit the "
            "job again with --code, or create the ConfigMap"
        )
    claim = ((spec.get("head") or {}).get("persistence") or {}).get("claimName")
    if facts.claim == "missing":
        yield _problem(
            f"the head's PersistentVolumeClaim {claim} does not exist; create it, or remove head.persistence"
        )
    elif facts.claim is not None and (phase := (facts.claim.get("status") or {}).get("phase")) == "Lost":
        yield _problem(f"the head's PersistentVolumeClaim {claim} is {phase}: its volume no longer exists")
    if holds(facts.job, "Completed") or holds(facts.job, "Failed"):
        return
    if facts.secret == "missing":
        if facts.pods:
            yield _problem(
                f"the Secret {tokens_secret(name)} with its tokens does not exist; the operator creates it: "
                "is it running?"
            )
    elif facts.secret is not None:
        missing = [role for role in _ROLES if not (facts.secret.get("data") or {}).get(role)]
        if missing:
            yield _problem(
                f"the Secret {tokens_secret(name)} lacks the tokens {', '.join(missing)}; delete it, and the operator "
                "recreates it within six minutes"
            )


def _of_pods(facts: JobFacts) -> Iterator[Finding]:
    code = (facts.job["spec"].get("code") or {}).get("configMap", "") if facts.has_code is False else ""
    troubles: dict[str, list[str]] = {}
    for pod in facts.pods or ():
        if not pod.is_live or pod.has_started:
            continue
        trouble = _cause(_pod_trouble(pod)) or _mount_trouble(pod, facts.events or ())
        if trouble and not (code and code in trouble):
            troubles.setdefault(trouble, []).append(pod.name)
    for trouble, names in troubles.items():
        others = {1: "", 2: " and another pod"}.get(len(names), f" and {len(names) - 1} other pods")
        yield _problem(f"{names[0]}{others} cannot start: {trouble}{_advice(trouble)}")


def _of_scheduling(facts: JobFacts, known: Sequence[Finding]) -> Iterator[Finding]:
    """What the operator says of pods that it could not make: they are not there to be looked at."""
    scheduled = condition(facts.job, "Scheduled")
    reason, words = scheduled.get("reason"), str(scheduled.get("message") or "")
    if scheduled.get("status") != "False" or any(words and words in finding.sentence for finding in known):
        return
    if reason == "QuotaExceeded":
        yield _problem(f"the namespace's quota is used up: {words}; raise the ResourceQuota or request less")
    elif reason == "ApiServerError":
        yield _problem(f"the API server refused to create its objects: {words}; the operator retries within a minute")
    elif reason == "WaitingForQuota":
        yield _problem(f"Kueue did not admit it: {words}")
    elif reason == "NamespaceTerminating":
        yield _problem(f"its namespace is being deleted: {words}")
    elif reason in ("Unschedulable", "ImagePull", "ContainerConfig") and not facts.pods:
        yield _problem(f"{why(scheduled)}{_advice(words)}")


def _of_head(facts: JobFacts) -> Iterator[Finding]:
    head = live_head(facts.pods or ())
    if head is None or facts.head_answer is None:
        return
    if not facts.head_answer:
        yield _ok(f"the head {head.name} answers and accepts the job's token")
    else:
        yield _problem(f"{facts.head_answer}; see `cormorant logs {facts.job['metadata']['name']}{facts.options}`")


def _of_course(facts: JobFacts) -> Iterator[Finding]:
    job = facts.job
    if holds(job, "Failed"):
        yield _problem(f"failed: {why(condition(job, 'Failed'))}")
    ready = condition(job, "Ready")
    if ready.get("reason") == "HeadBlocked":
        yield _problem(
            f"the head cannot run in its environment: {why(ready)}; fix the cause, the operator retries every 2 min"
        )
    if holds(job, "Stalled"):
        yield _problem(f"stalled: {why(condition(job, 'Stalled'))}")
    progressing = condition(job, "Progressing")
    if progressing.get("status") == "Unknown":
        yield _problem(f"the operator cannot reach the head: {why(progressing)}; does a NetworkPolicy block it?")
    if progressing.get("reason") == "WaitingForConsumer":
        yield _note(f"workers are waiting: {progressing.get('message') or 'the queue is full'}")
    failures = (job.get("status") or {}).get("recentFailures") or ()
    killed = [failure for failure in failures if failure.get("reason") == "OOMKilled"]
    if killed:
        yield _note(
            f"{len(killed)} pods ran out of memory, most recently {killed[-1]['pod']}; raise the memory "
            "limit of their group"
        )
    others = [failure for failure in failures if failure.get("reason") != "OOMKilled"]
    if others:
        last = others[-1]
        code = f", exit code {last['exitCode']}" if last.get("exitCode") is not None else ""
        when = age(read_time(last["time"]), facts.now)
        words = f": {last['message']}" if last.get("message") else ""
        yield _note(f"{len(others)} pods failed, most recently {last['pod']} {when} ago: {last['reason']}{code}{words}")


def _of_health(facts: JobFacts) -> Iterator[Finding]:
    job = facts.job
    status = job.get("status") or {}
    if holds(job, "Completed"):
        yield _ok(f"complete: {int((status.get('frames') or {}).get('collected') or 0):,} frames")
    elif holds(job, "Ready"):
        frames = status.get("frames") or {}
        yield _ok(
            f"{int(frames.get('collected') or 0):,} frames collected, {float(frames.get('perSecond') or 0):,.0f}/s"
        )
    elif status:
        facts_of = (condition(job, kind) for kind in ("Scheduled", "Ready"))
        words = next((why(fact) for fact in facts_of if fact.get("status") == "False"), status.get("phase", ""))
        yield _note(f"starting: {words}")


# -- parts -------------------------------------------------------------------------------------------------------


def age_of(raw: Raw, now: datetime) -> str:
    return age(read_time(raw["metadata"]["creationTimestamp"]), now)


def _pod_trouble(pod: JobPod) -> str:
    """Why a pod does not run; a container that ended tells too."""
    if waits := why_waiting(pod):
        return waits
    for container in (pod.raw.get("status") or {}).get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            words = ended.get("message") or "see its log"
            return f"{ended.get('reason', 'Error')}, exit code {ended['exitCode']}: {words}"
    return ""


def _cause(trouble: str) -> str:
    """What is behind a back-off: pods that wait for one image are in one state and the other in turn."""
    _, found, cause = trouble.partition(": ErrImagePull: ")
    return f"ErrImagePull: {cause}" if found else trouble


def _mount_trouble(pod: JobPod, events: Sequence[Raw]) -> str:
    own = [
        event
        for event in events
        if event["involvedObject"].get("uid") == pod.raw["metadata"]["uid"] and event.get("reason") in _MOUNTING
    ]
    return " ".join(f"{own[-1]['reason']}: {own[-1].get('message', '')}".split()) if own else ""


def _advice(trouble: str) -> str:
    """What to do about a pod that does not start, as the end of a sentence."""
    reason = trouble.partition(":")[0]
    if reason in _PULLING:
        return "; check the image's name and whether the nodes may pull it (imagePullSecrets)"
    if f"Insufficient {GPU}" in trouble:
        return f"; no node has a free {GPU}: add one, or set device: cpu"
    if "Insufficient" in trouble:
        return "; lower resources.requests or add nodes"
    if "untolerated taint" in trouble or "node affinity" in trouble or "node selector" in trouble.lower():
        return "; change nodeSelector or tolerations in the group's template"
    if reason == "CreateContainerConfigError":
        return "; create the object that the container refers to"
    return ""


def _wanted_gpus(job: Raw) -> dict[str, int]:
    """Devices that one worker requests, by group."""
    wanted = {}
    for group in job["spec"].get("workerGroups") or ():
        limits = (group.get("resources") or {}).get("limits") or {}
        count = limits.get(GPU, 1 if group.get("device") == "gpu" else 0)
        if str(count).isdecimal() and int(count):
            wanted[str(group["name"])] = int(count)
    return wanted


def _gpus(node: Raw) -> int:
    count = str(((node.get("status") or {}).get("allocatable") or {}).get(GPU, "0"))
    return int(count) if count.isdecimal() else 0


def _watched(deployment: Raw) -> set[str]:
    """Namespaces that an operator's arguments name; empty: all."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    arguments = [str(word) for container in containers for word in container.get("args") or ()]
    return {word.partition("=")[2] for word in arguments if word.startswith("--namespace=")}


def _names_of(objects: Sequence[Raw]) -> str:
    names = sorted(str(raw["metadata"]["name"]) for raw in objects)
    return ", ".join(names[:5]) + (" and others" if len(names) > 5 else "")


def _ok(sentence: str) -> Finding:
    return Finding(level="ok", sentence=sentence)


def _note(sentence: str) -> Finding:
    return Finding(level="note", sentence=sentence)


def _problem(sentence: str) -> Finding:
    return Finding(level="problem", sentence=sentence)
