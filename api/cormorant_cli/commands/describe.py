"""`cormorant describe JOB`: what is known of a job, for a person."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from cormorant_cli.cluster import Cluster, Raw, connected
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import CommandFailed
from cormorant_cli.jobs import JobPod, age, identity, is_current, pods_of, read_time, why_waiting
from cormorant_cli.printing import columns_of
from cormorant_contract.children import RESTARTS

_MOST_EVENTS = 10
_MOST_FAILURES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    job: Raw
    pods: Sequence[JobPod]
    events: Sequence[Raw]
    now: datetime
    gaps: tuple[str, ...] = ()
    """What could not be read, as sentences."""


def describe(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Show a job's conditions, frames, groups, workers, restarts and last events."""
    with connected(context) as cluster:
        found = cluster.get("CollectorJob", job, namespace=namespace or cluster.namespace)
        typer.echo("\n".join(lines_of(look(cluster, found))))


def look(cluster: Cluster, job: Raw) -> Picture:
    """Everything that the user may read of a job."""
    gaps: list[str] = []
    pods: list[JobPod] = []
    events: list[Raw] = []
    try:
        pods = pods_of(cluster, job)
    except CommandFailed as error:
        gaps.append(f"cannot list its pods: {error}")
    try:
        events = events_of(cluster, job, pods)
    except CommandFailed as error:
        gaps.append(f"cannot list its events: {error}")
    return Picture(job=job, pods=pods, events=events, now=datetime.now(UTC), gaps=tuple(gaps))


def events_of(cluster: Cluster, job: Raw, pods: Sequence[JobPod]) -> list[Raw]:
    """Events of a job and of its pods that are there, oldest first."""
    namespace = job["metadata"]["namespace"]
    own = {job["metadata"]["uid"], *(pod.raw["metadata"]["uid"] for pod in pods)}
    found = [
        event
        for kind in ("CollectorJob", "Pod")
        for event in cluster.objects("Event", namespace=namespace, fields=f"involvedObject.kind={kind}")
    ]
    return sorted((event for event in found if event["involvedObject"].get("uid") in own), key=event_time)


def event_time(event: Raw) -> datetime:
    """When an event happened last."""
    series = event.get("series") or {}
    text = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return read_time(text or event["metadata"]["creationTimestamp"])


def lines_of(picture: Picture) -> Iterator[str]:
    job, now = picture.job, picture.now
    status, spec = job.get("status") or {}, job["spec"]
    born = read_time(job["metadata"]["creationTimestamp"])
    yield f"{identity(job)}: {status.get('phase') or 'not reconciled yet'}, {age(born, now)} old"
    yield f"  {'env':<10}{_env(spec)}"
    yield f"  {'policy':<10}{(spec.get('policy') or {}).get('entrypoint') or 'random actions'}"
    for kind, source in (spec.get("code") or {}).items():
        yield f"  {'code':<10}{'ConfigMap' if kind == 'configMap' else kind} {source}"
    counted = "episodes" if spec["collection"].get("episodes") else "frames"
    yield f"  {counted:<10}{_frames(status.get('frames') or {}, now)}"
    yield f"  {'weights':<10}{_weights(status.get('weights') or {}, now)}"
    restarts = int(status.get("headRestarts") or 0)
    yield f"  {'head':<10}epoch {status.get('epoch', 0)}, {restarts} failures in a row"
    if not is_current(job) and status:
        yield "  the operator has not reconciled the newest spec yet"
    yield from _section("Conditions", _conditions(status, now))
    yield from _section("Groups", _groups(job, status))
    yield from _section("Pods", _pods(picture.pods, now))
    yield from _section("Last failures", _failures(status, now))
    yield from _section("Last events", _events_of(picture.events, now))
    for gap in picture.gaps:
        yield f"\n{gap}"


def _section(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield f"\n{title}"
        yield columns_of(rows, indent="  ")


def _env(spec: Raw) -> str:
    env = spec["env"]
    if "envpool" in env:
        return f"EnvPool {env['envpool'].get('taskId')}, {env['envpool'].get('numEnvs', 1)} per worker"
    found = env["gymnasium"]
    return f"gymnasium {found.get('id') or found.get('entrypoint')}, {found.get('numEnvs', 1)} per worker"


def _frames(frames: Raw, now: datetime) -> str:
    collected, target = int(frames.get("collected") or 0), int(frames.get("target") or 0)
    rate = float(frames.get("perSecond") or 0)
    whole = f"{collected:,} of {target:,} ({100 * collected / target:.0f}%)" if target else f"{collected:,}"
    last = frames.get("lastProgressTime")
    when = f", the last {age(read_time(last), now)} ago" if last else ""
    left = ""
    if target and rate and collected < target:
        end = now + timedelta(seconds=min((target - collected) / rate, 3.15e8))
        left = f", {age(now, end)} left"
    return f"{whole}, {rate:,.0f}/s{when}{left}"


def _weights(weights: Raw, now: datetime) -> str:
    version = int(weights.get("version") or 0)
    if not version:
        return "none published"
    updated = weights.get("updatedTime")
    when = f", published {age(read_time(updated), now)} ago" if updated else ""
    return f"version {version}, oldest version in use {weights.get('minAppliedVersion', 0)}{when}"


def _conditions(status: Raw, now: datetime) -> list[list[str]]:
    return [
        [
            str(fact.get("type", "")),
            str(fact.get("status", "")),
            str(fact.get("reason", "")),
            age(read_time(fact["lastTransitionTime"]), now),
            str(fact.get("message") or "").partition("\n")[0],  # without a traceback
        ]
        for fact in status.get("conditions") or ()
    ]


def _groups(job: Raw, status: Raw) -> list[list[str]]:
    devices = {group["name"]: group.get("device", "cpu") for group in job["spec"].get("workerGroups") or ()}
    return [
        [
            str(group["name"]),
            str(devices.get(group["name"], "cpu")),
            f"{group.get('ready', 0)} of {group.get('desired', 0)} ready",
            f"{group.get('restarts', 0)} restarts",
        ]
        for group in status.get("groups") or ()
    ]


def _pods(pods: Sequence[JobPod], now: datetime) -> list[list[str]]:
    rows = []
    for pod in pods:
        annotations = pod.raw["metadata"].get("annotations") or {}
        state = "Terminating" if pod.is_terminating else pod.phase + ("" if pod.is_ready else ", not ready")
        if pod.phase in ("Succeeded", "Failed"):
            state = pod.phase
        node = (pod.raw.get("spec") or {}).get("nodeName") or "no node"
        restarts = f"{annotations.get(RESTARTS) or 0} restarts" if pod.slot else f"epoch {pod.epoch}"
        row = [pod.slot or pod.role, pod.name, state, node, restarts, age(pod.created, now), why_waiting(pod)]
        rows.append(row)
    return rows


def _failures(status: Raw, now: datetime) -> list[list[str]]:
    found = list(status.get("recentFailures") or ())[-_MOST_FAILURES:]
    return [
        [
            str(failure.get("pod", "")),
            str(failure.get("reason", "")),
            f"exit code {failure['exitCode']}" if failure.get("exitCode") is not None else "",
            f"{age(read_time(failure['time']), now)} ago" if failure.get("time") else "",
            str(failure.get("message") or ""),
        ]
        for failure in found
    ]


def _events_of(events: Sequence[Raw], now: datetime) -> list[list[str]]:
    return [
        [
            f"{age(event_time(event), now)} ago",
            str(event.get("type") or ""),
            str(event.get("reason") or ""),
            event["involvedObject"].get("name", ""),
            " ".join(str(event.get("message") or "").split()),
        ]
        for event in events[-_MOST_EVENTS:]
    ]
