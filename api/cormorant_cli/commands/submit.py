"""`cormorant submit FILE`: sends the jobs of a manifest to a cluster, with their code.

    validate locally -> the job -> ConfigMap of --code, which is deleted with the job

Server-side apply: submitting a changed manifest updates the job; fields of other owners (an autoscaler's replicas) stay
theirs without --force-conflicts.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.alias_generators import to_camel

from cormorant_cli.cluster import Cluster, Raw, condition, connected, holds, identity, is_current, why
from cormorant_cli.code_map import CodeMap, read_code
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import BadInput, CommandFailed, ObjectMissing
from cormorant_cli.printing import tell
from cormorant_contract.base import Contract
from cormorant_contract.job import API_VERSION, KIND, CollectorJob
from cormorant_manifest.reader import load_jobs

_POLL_S = 0.5


def submit(
    manifest: Annotated[
        str, typer.Argument(metavar="FILE", help="CollectorJob manifest in YAML; - reads standard input.")
    ],
    code: Annotated[
        Path | None, typer.Option("--code", metavar="DIR", help="Folder with environments and policies, at most 1 MiB.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the jobs collect; exits with 1 if one fails.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait with --wait.")] = 600.0,
    force_conflicts: Annotated[
        bool, typer.Option("--force-conflicts", help="Take over fields owned by other managers.")
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Create or update the jobs of a manifest, after the same checks as `cormorant validate`."""
    jobs = load_jobs(manifest)
    files = read_code(code) if code is not None else None
    for job in jobs:
        _refuse_contradictions(job, files, namespace=namespace, is_alone=len(jobs) == 1)
    with connected(context) as cluster:
        made = [
            _submit(
                cluster,
                document_of(job, files, namespace=namespace or cluster.namespace),
                files,
                is_forced=force_conflicts,
            )
            for job in jobs
        ]
        tell([raw for raw, _ in made], *(f"{identity(raw)}: {word}" for raw, word in made))
        deadline = time.monotonic() + timeout
        for raw, _ in made if wait else ():
            _wait_until_ready(cluster, raw, deadline=deadline, timeout_s=timeout)


def document_of(job: CollectorJob, files: CodeMap | None, *, namespace: str) -> Raw:
    """The document to send: the fields that the user wrote, without defaults, so that the sender owns no other fields.
    `namespace`: used if the manifest has none.
    """
    written = _written(job)
    given = written["metadata"]
    metadata = {key: given[key] for key in ("name", "namespace", "labels", "annotations") if key in given}
    metadata.setdefault("namespace", namespace)
    spec = written["spec"]
    if files is not None:
        spec = {**spec, "code": {"configMap": files.name(job.metadata.name)}}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def _written(value: object) -> Any:
    """A model as plain data with only the fields that the user wrote; null counts as absent."""
    if isinstance(value, Contract):
        fields = {
            to_camel(name): getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set
        }
        return {key: _written(item) for key, item in fields.items() if item is not None} | (value.model_extra or {})
    return [_written(item) for item in value] if isinstance(value, tuple) else value


def _refuse_contradictions(job: CollectorJob, files: CodeMap | None, *, namespace: str, is_alone: bool) -> None:
    name, written = job.metadata.name, job.metadata.namespace
    if namespace and "namespace" in job.metadata.model_fields_set and written != namespace:
        raise BadInput(
            f'the manifest puts {name} in namespace "{written}", --namespace says "{namespace}"; remove one of them'
        )
    if files is None:
        return
    if not is_alone:
        raise BadInput("--code works with one job, but the manifest has several; submit them one by one")
    if (code := job.spec.code) is not None:
        source = f'the ConfigMap "{code.config_map}"' if code.image is None else f'the image "{code.image}"'
        raise BadInput(f"spec.code of {name} names {source}, but --code creates another ConfigMap; remove one of them")


def _submit(cluster: Cluster, document: Raw, files: CodeMap | None, *, is_forced: bool) -> tuple[Raw, str]:
    """Apply a job and its code. Returns the job, and what was done with it."""
    name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
    before = cluster.find("CollectorJob", name, namespace=namespace)
    job, is_created = cluster.apply(document, is_forced=is_forced)
    if files is not None:
        # After the job, its owner: Kubernetes deletes both together, and the ConfigMap of a deleted job of this name is
        # taken over. The operator needs longer to create a pod that mounts it.
        cluster.apply(files.manifest(name, namespace=namespace, owner=job))
    if is_created:
        return job, "created"
    generations = (raw["metadata"].get("generation") for raw in (before or job, job))
    return job, "unchanged" if len(set(generations)) == 1 else "changed"


def _wait_until_ready(cluster: Cluster, job: Raw, *, deadline: float, timeout_s: float) -> None:
    """Wait until the newest spec is ready or the job has ended, and print each change on stderr."""
    uid, said = job["metadata"]["uid"], ""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    while True:
        found = cluster.find("CollectorJob", name, namespace=namespace)
        if found is None or found["metadata"]["uid"] != uid:
            raise ObjectMissing(f"{identity(job)} was deleted while waiting for it")
        if holds(found, "Failed"):
            raise CommandFailed(f"{identity(job)} failed: {why(condition(found, 'Failed'))}")
        if holds(found, "Completed") or (is_current(found) and holds(found, "Ready")):
            typer.echo(f"{identity(job)}: {found['status'].get('phase', 'Ready')}")
            return
        obstacle = obstacle_of(found)
        if obstacle and obstacle != said:
            typer.echo(f"{identity(job)}: {obstacle}", err=True)
            said = obstacle
        if time.monotonic() >= deadline:
            reason = obstacle or "no operator has reconciled it"
            doctor = f"cormorant doctor {name}{cluster.options_of(job)}"
            raise CommandFailed(f"{identity(job)} is not ready after {timeout_s:g} s: {reason}; see `{doctor}`")
        time.sleep(_POLL_S)


def obstacle_of(job: Raw) -> str:
    """The reason for which a job waits, from its conditions; empty if they name none."""
    for kind in ("Accepted", "Scheduled", "Ready"):
        fact = condition(job, kind)
        if fact.get("status") == "False":
            return why(fact)
    return why(condition(job, "Suspended")) if holds(job, "Suspended") else ""
