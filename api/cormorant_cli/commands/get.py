"""`cormorant get [JOB...]`: the jobs of a namespace, in the columns of the CRD."""

from typing import Annotated

import typer

from cormorant_cli.cluster import Cluster, connected
from cormorant_cli.connection import Context, Namespace
from cormorant_cli.errors import BadInput
from cormorant_cli.printing import OutputOption, show_objects, show_table


def get(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB...]", help="Jobs to list (default: all).")] = None,
    namespace: Namespace = "",
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs in all namespaces.")
    ] = False,
    context: Context = "",
    output: OutputOption = "table",
) -> None:
    """List jobs: phase, frames, frames per second, policy version, workers."""
    names = list(dict.fromkeys(jobs or ()))
    if all_namespaces and (names or namespace):
        raise BadInput("--all-namespaces lists all jobs; remove the names and --namespace")
    with connected(context) as cluster:
        where = "" if all_namespaces else namespace or cluster.namespace
        if output in ("table", "wide"):
            tables = [cluster.table("CollectorJob", name, namespace=where) for name in names or [""]]
            whole = {**tables[0], "rows": [row for table in tables for row in table.get("rows") or ()]}
            if whole["rows"]:
                typer.echo(show_table(whole, is_wide=output == "wide", has_namespaces=all_namespaces))
            else:
                _say_none(cluster, where)
            return
        found = [cluster.get("CollectorJob", name, namespace=where) for name in names]
        found = found if names else cluster.objects("CollectorJob", namespace=where)
        if not found:
            _say_none(cluster, where)
        if found or output != "name":
            typer.echo(show_objects(found, output, is_list=len(names) != 1))


def _say_none(cluster: Cluster, namespace: str) -> None:
    """A namespace that does not exist has no jobs either, says the API server."""
    if namespace:
        cluster.refuse_namespace(namespace)
    typer.echo(f"there are no jobs in {f'namespace {namespace}' if namespace else 'the cluster'}", err=True)
