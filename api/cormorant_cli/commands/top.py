"""`cormorant top`: jobs side by side, live on a terminal, once into a pipe.

Heads of URLs are asked one by one (`sources.py`), jobs of a cluster are listed (`census.py`).
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.connection import AsJson, CaFile, Connection, Context, Namespace, Token, are_written
from cormorant_cli.errors import BadInput, CommandFailed
from cormorant_cli.sources import Board, Entry, HeadClient, url_heads
from cormorant_cli.top_table import NUMBERS, columns, cut, lines_of, rows_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

    from cormorant_cli.census import Asking, Census
    from cormorant_cli.cluster import Cluster, Raw

_REDRAW_S = 0.5
_ANSWER_S = 10.0


def top(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB...]", help="Jobs of the cluster whose heads are asked (default: list all jobs)."),
    ] = None,
    namespace: Namespace = "",
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs in all namespaces.")
    ] = False,
    context: Context = "",
    urls: Annotated[
        list[str] | None,
        typer.Option("--url", envvar="CORMORANT_URL", metavar="URL", help="URL of a head; repeat for several jobs."),
    ] = None,
    token: Token = "",
    token_files: Annotated[
        list[str] | None,
        typer.Option(
            "--token-file",
            envvar="CORMORANT_TOKEN_FILE",
            metavar="FILE",
            help="Token file: one for all heads, or one per --url in the same order.",
        ),
    ] = None,
    ca_file: CaFile = "",
    workers: Annotated[
        bool,
        typer.Option("--workers", "-w", help="Also show every worker. On a cluster this asks the heads, at most 8."),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two requests to a head (list of a cluster: at least 5).")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the table once (the default when output is piped).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show frames per second, workers and policy lag of jobs until Ctrl-C.

    Jobs of a cluster are shown as their operator wrote them last; with names or --workers their heads are asked. With
    --url or CORMORANT_URL, and no name, -n, -A or --context, heads are shown that need no cluster.

    A job that does not answer says so in its line. Printed once, it ends with 1 when nothing is known of any.
    """
    from cormorant_cli.census import Census, Scope

    interval_s = 0.0 if _is_once(once=once, as_json=as_json) else interval
    names = tuple(dict.fromkeys(jobs or ()))
    if all_namespaces and (names or namespace):
        raise BadInput("--all-namespaces shows all jobs; remove the names and --namespace")
    is_cluster = bool(names or namespace or all_namespaces or context)
    if is_cluster and are_written(urls or (), "CORMORANT_URL"):
        raise BadInput("--url names a head outside a cluster; remove --url, or the names, -n, -A and --context")
    if urls and not is_cluster:
        heads = url_heads(urls, token=token, token_files=token_files or (), ca_file=ca_file)
        show(Board(heads, workers=workers, interval_s=interval_s), is_once=not interval_s, as_json=as_json)
        return
    files = token_files if token_files and are_written(token_files, "CORMORANT_TOKEN_FILE") else []
    if len(files) > 1:
        raise BadInput(f"{len(files)} token files for jobs of a cluster; give at most one")
    with _cluster_of(context, has_said_so=is_cluster) as cluster:
        scope = Scope(namespace="" if all_namespaces else namespace or cluster.namespace, names=names)
        asking = _asking(cluster, token=token, token_file="".join(files), ca_file=ca_file, workers=workers)
        census = Census(cluster, scope, asking=asking if names or workers else None, interval_s=interval_s)
        show(census, is_once=not interval_s, as_json=as_json)


@contextmanager
def _cluster_of(context: str, *, has_said_so: bool) -> "Iterator[Cluster]":
    from cormorant_cli.cluster import connect

    try:
        cluster = connect(context)
    except BadInput as error:
        if has_said_so:
            raise
        raise BadInput(f"{error}; or name a head with --url") from error
    try:
        yield cluster
    finally:
        cluster.close()


def _asking(cluster: "Cluster", *, token: str, token_file: str, ca_file: str, workers: bool) -> "Asking":
    from cormorant_cli.census import Asking

    def open_head(job: "Raw") -> "AbstractContextManager[HeadClient]":
        name = job["metadata"]["name"]
        connection = Connection(url="", token=token, token_file=token_file, ca_file=ca_file, job=name)
        return connection.client_in(cluster, job, "read")

    return Asking(open_head=open_head, workers=workers)


def _is_once(*, once: bool, as_json: bool) -> bool:
    return as_json or once or not sys.stdout.isatty()


def show(jobs: "Board | Census", *, is_once: bool, as_json: bool) -> None:
    """Show jobs, wherever they are asked, and close them.

    Raises:
        CommandFailed: the table was printed once, and nothing is known of any job.
    """
    try:
        if is_once:
            _print(jobs.wait(_ANSWER_S), notice=jobs.notice, as_json=as_json)
        else:
            _watch(jobs)
    finally:
        jobs.close()


def _print(entries: Sequence[Entry], *, notice: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"jobs": [_document(entry) for entry in entries]}))
    elif entries:
        typer.echo("\n".join(lines_of(tuple(rows_of(entries)))))
    if notice:
        typer.echo(notice, err=True)
    if entries and all(entry.reading is None and entry.written is None for entry in entries):
        raise CommandFailed("no job answered; see the table for the reasons" if not as_json else "no job answered")


def _watch(jobs: "Board | Census") -> None:
    # rich takes a while to load, and a pipe needs none of it.
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                entries, notice = jobs.entries(), jobs.notice
                live.update(_render(entries, notice=notice, height=console.height), refresh=True)
                time.sleep(_REDRAW_S)
    except KeyboardInterrupt:
        return  # the way to leave it


def _render(entries: Sequence[Entry], *, notice: str, height: int) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = cut(tuple(rows_of(entries)), height - (4 if notice else 2))
    # A long note may take lines of its own where there are few rows.
    is_crowded = 2 * len(rows) > height
    headings, lines = columns(rows)
    table = Table(box=None, pad_edge=False, expand=True)
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in NUMBERS else "left",
            no_wrap=is_crowded or heading != "NOTE",
            overflow="ellipsis",
            ratio=1 if heading == "NOTE" else None,
        )
    for row, cells in zip(rows, lines, strict=True):
        # Text, so that brackets in what others wrote are no markup.
        table.add_row(*map(Text, cells), style="dim" if row.is_stale else "")
    return Group(table, Text(notice, style="yellow")) if notice else table


def _document(entry: Entry) -> dict[str, object]:
    reading, written = entry.reading, entry.written
    found: dict[str, object] = {
        "name": entry.name,
        "error": entry.error,
        "status": reading.status.model_dump(mode="json") if reading is not None else None,
        "workers": [worker.model_dump(mode="json") for worker in reading.workers] if reading is not None else [],
    }
    if written is not None:
        found |= {"namespace": written.namespace, "reported": dict(written.status), "reported_age_s": written.age_s}
    return found
