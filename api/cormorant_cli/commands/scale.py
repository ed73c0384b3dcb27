"""`cormorant scale JOB --replicas N [--group G]`: more workers, or fewer."""

from typing import Annotated

import typer

from cormorant_cli.cluster import Cluster, Raw, connected, near_names
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import BadInput, ObjectConflict
from cormorant_cli.jobs import identity
from cormorant_contract.workers import MAX_REPLICAS

_TRIES = 3


def scale(
    job: Annotated[str, typer.Argument(metavar="JOB")],
    replicas: Annotated[int, typer.Option("--replicas", min=0, max=MAX_REPLICAS, help="Workers.")],
    group: Annotated[str, typer.Option("--group", metavar="G", help="Worker group (default: the elastic group).")] = "",
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Set the number of workers of a group. Removed workers finish their batch first."""
    with connected(context) as cluster:
        where = namespace or cluster.namespace
        found = cluster.get("CollectorJob", job, namespace=where)
        elastic = elastic_group(found)
        name = group or elastic
        before = _size(found, name, elastic)
        if name == elastic:
            # What an autoscaler writes too: it will have the last word.
            cluster.patch("CollectorJob", job, {"spec": {"replicas": replicas}}, namespace=where, subresource="scale")
        else:
            _resize_fixed(cluster, found, name, replicas)
        typer.echo(f"{identity(found)}: {name} {before} -> {replicas} workers")


def elastic_group(job: Raw) -> str:
    spec = job["spec"]
    return str(spec.get("elasticGroup") or _groups(job)[0]["name"])


def _groups(job: Raw) -> list[Raw]:
    return list(job["spec"].get("workerGroups") or ({"name": "cpu"},))


def _size(job: Raw, name: str, elastic: str) -> int:
    names = [str(group["name"]) for group in _groups(job)]
    if name not in names:
        raise BadInput(f'{identity(job)} has no group "{name}"{near_names(name, names)}')
    group = _groups(job)[names.index(name)]
    return int((job["spec"].get("replicas") if name == elastic else group.get("replicas")) or 0)


def _resize_fixed(cluster: Cluster, job: Raw, name: str, replicas: int) -> None:
    """Change one item of a list: the place that was read must still be that group's."""
    where, job_name = job["metadata"]["namespace"], job["metadata"]["name"]
    for attempt in range(_TRIES):
        index = [group["name"] for group in _groups(job)].index(name)
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": job["metadata"]["resourceVersion"]},
            {"op": "add", "path": f"/spec/workerGroups/{index}/replicas", "value": replicas},
        ]
        try:
            cluster.patch("CollectorJob", job_name, patch, namespace=where)
        except (ObjectConflict, BadInput):
            # A failed test is 422, and so is a refusal for good: what changed tells them apart.
            fresh = cluster.get("CollectorJob", job_name, namespace=where)
            if attempt == _TRIES - 1 or fresh["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"]:
                raise
            _size(fresh, name, elastic_group(fresh))
            job = fresh
        else:
            return
