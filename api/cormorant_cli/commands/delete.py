"""`cormorant delete JOB...`: jobs and all that belongs to them."""

import time
from typing import Annotated, Literal

import typer

from cormorant_cli.cluster import Cluster, Raw, connected
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import CommandFailed
from cormorant_cli.jobs import identity, name_of, pods_of
from cormorant_cli.printing import told_when_slow

_POLL_S = 0.3


def delete(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the pods are gone too.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait with --wait.")] = 120.0,
    namespace: Namespace = "",
    context: Context = "",
    output: Annotated[Literal["table", "name"], typer.Option("--output", "-o", help="Output format.")] = "table",
) -> None:
    """Delete jobs with their pods, Services, Secrets and code. Durable datasets are kept."""
    with connected(context) as cluster:
        where = namespace or cluster.namespace
        # All of them are looked up first: a name that is wrong deletes nothing.
        found = [cluster.get("CollectorJob", name, namespace=where) for name in dict.fromkeys(jobs)]
        for job in found:
            cluster.delete("CollectorJob", job["metadata"]["name"], namespace=where, uid=job["metadata"]["uid"])
        deadline = time.monotonic() + timeout
        for job in found:
            if wait:
                with told_when_slow(f"until {identity(job)} and its pods are gone, at most {timeout:g} s"):
                    _wait_until_gone(cluster, job, deadline=deadline, timeout_s=timeout)
            typer.echo(name_of(job) if output == "name" else f"{identity(job)}: deleted")


def _wait_until_gone(cluster: Cluster, job: Raw, *, deadline: float, timeout_s: float) -> None:
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    while True:
        left = cluster.find("CollectorJob", name, namespace=namespace)
        is_there = left is not None and left["metadata"]["uid"] == job["metadata"]["uid"]
        pods = [pod.name for pod in pods_of(cluster, job)]
        if not is_there and not pods:
            return
        if time.monotonic() >= deadline:
            rest = ", ".join([*(["the job"] if is_there else []), *pods])
            raise CommandFailed(f"{identity(job)} was deleted, but after {timeout_s:g} s these remain: {rest}")
        time.sleep(_POLL_S)
