"""`cormorant report JOB`: the live page of a running job with its data, in one file."""

from pathlib import Path
from typing import Annotated

import typer

from cormorant_cli.commands.weights import write_whole
from cormorant_cli.connection import Connection, with_connection
from cormorant_cli.printing import tell, told_when_slow


@with_connection
def report(
    connection: Connection,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="HTML file to write; - prints it (default: JOB-report.html).")
    ] = "",
) -> None:
    """Save a report of a running job: totals, returns, where time went, events and versions, in one HTML file."""
    from cormorant_api.live.report import make_report

    with connection.client("read") as client, told_when_slow("for the head's history"):
        opening = client.opening()
    html = make_report(opening.model_dump_json(), versions={})
    if out == "-":
        typer.echo(html)
        return
    path = Path(out or f"{opening.moment.status.job}-report.html")
    write_whole(path, memoryview(html.encode()))
    tell({"report": str(path)}, f"report: {path}")
