"""`cormorant top`: running jobs side by side, live on a terminal, once into a pipe."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cormorant_cli.connection import AsJson, Token
from cormorant_cli.errors import CommandFailed
from cormorant_cli.sources import Board, Entry, Source, url_sources

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cormorant_contract.rest.status import Status, Worker

_REDRAW_S = 0.5
_ANSWER_S = 10.0
_HEADINGS = ("JOB", "PHASE", "FRAMES/S", "FRAMES", "WORKERS", "VERSION", "BEHIND", "RETURN", "QUEUE", "NOTE")
_NUMBERS = frozenset({"FRAMES/S", "FRAMES", "WORKERS", "VERSION", "BEHIND", "RETURN", "QUEUE"})
_NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table, in the order of the headings."""

    job: str
    phase: str
    fps: str = ""
    frames: str = ""
    workers: str = ""
    version: str = ""
    behind: str = ""
    mean_return: str = ""
    queue: str = ""
    note: str = ""
    is_stale: bool = False
    """The job does not answer: these are its last words."""

    @property
    def cells(self) -> tuple[str, ...]:
        """One for each heading, each in one line."""
        note = " ".join(self.note.split())
        return (
            self.job, self.phase, self.fps, self.frames, self.workers,
            self.version, self.behind, self.mean_return, self.queue, note,
        )  # fmt: skip


def top(
    urls: Annotated[
        list[str] | None,
        typer.Option("--url", envvar="CORMORANT_URL", metavar="URL", help="A head; once for each job."),
    ] = None,
    token: Token = "",
    token_files: Annotated[
        list[str] | None,
        typer.Option(
            "--token-file",
            envvar="CORMORANT_TOKEN_FILE",
            metavar="FILE",
            help="The head's token file: one for all, or one for each --url in the same order.",
        ),
    ] = None,
    workers: Annotated[bool, typer.Option("--workers", "-w", help="Show every worker, too.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two questions to a job.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once; so it is into a pipe.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show jobs with frames per second, workers and how far they are behind, until Ctrl-C.

    A job that does not answer says so in its line. Printed once, it ends with 1 when none answers.
    """
    sources = url_sources(urls or (), token=token, token_files=token_files or (), workers=workers)
    show(sources, interval_s=interval, once=once, as_json=as_json)


def show(sources: Sequence[Source], *, interval_s: float, once: bool, as_json: bool) -> None:
    """Show jobs, wherever they are asked.

    Raises:
        CommandFailed: the table was printed once, and no job answered.
    """
    if as_json or once or not sys.stdout.isatty():
        _print(Board(sources, interval_s=0).wait(_ANSWER_S), as_json=as_json)
    else:
        _watch(Board(sources, interval_s=interval_s))


def _print(entries: Sequence[Entry], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"jobs": [_document(entry) for entry in entries]}))
    else:
        typer.echo("\n".join(lines_of(tuple(rows_of(entries)))))
    if not any(entry.reading is not None for entry in entries):
        raise CommandFailed("no job answered; the table says why" if not as_json else "no job answered")


def _watch(board: Board) -> None:
    # rich takes a while to load, and a pipe needs none of it.
    from rich.console import Console
    from rich.live import Live

    try:
        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while True:
                live.update(_render(board.entries()), refresh=True)
                time.sleep(_REDRAW_S)
    except KeyboardInterrupt:
        return  # the way to leave it
    finally:
        board.close()


def rows_of(entries: Sequence[Entry]) -> Iterator[Row]:
    """The table, a row a job, its workers below it where they are known; at the end the sum of several jobs."""
    for entry in entries:
        reading = entry.reading
        if reading is None:
            note = entry.error if entry.is_asked else "asking"
            yield Row(job=entry.name, phase="Unreachable" if entry.error else _NOTHING, note=note)
            continue
        yield _job_row(reading.status, error=entry.error)
        for worker in reading.workers:
            yield _worker_row(worker, is_stale=bool(entry.error))
    if len(entries) > 1:
        answering = [entry.reading.status for entry in entries if entry.reading is not None and not entry.error]
        yield _sum_row(answering, len(entries))


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table as plain text, columns aligned."""
    table = [_HEADINGS, *(row.cells for row in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(_HEADINGS))]
    return [
        "  ".join(
            cell.rjust(width) if heading in _NUMBERS else cell.ljust(width)
            for heading, cell, width in zip(_HEADINGS, cells, widths, strict=True)
        ).rstrip()
        for cells in table
    ]


def _render(entries: Sequence[Entry]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=True)
    for heading in _HEADINGS:
        table.add_column(
            heading,
            justify="right" if heading in _NUMBERS else "left",
            no_wrap=heading != "NOTE",
            overflow="ellipsis",
            ratio=1 if heading == "NOTE" else None,
        )
    for row in rows_of(entries):
        # Text, so that brackets in what others wrote are no markup.
        table.add_row(*map(Text, row.cells), style="dim" if row.is_stale else "")
    return table


def _job_row(status: "Status", *, error: str) -> Row:
    frames, fresh, queue = status.frames, status.weights, status.queue
    share = f" ({min(1.0, frames.collected / frames.target):.0%})" if frames.target else ""
    mean_return = status.episodes.mean_return
    return Row(
        job=f"{status.namespace}/{status.job}" if status.namespace not in ("", "default") else status.job,
        phase="Unreachable" if error else status.phase,
        fps=f"{frames.per_second:,.0f}",
        frames=f"{frames.collected:,}{share}",
        workers=_workers_of([status]),
        version=f"{fresh.version}",
        behind=f"{fresh.version - fresh.min_applied_version}",
        mean_return=f"{mean_return:.2f}" if mean_return is not None else _NOTHING,
        queue=f"{queue.waiting + queue.ready}/{queue.capacity}" if queue.capacity else _NOTHING,
        note=error or _note_of(status),
        is_stale=bool(error),
    )


def _note_of(status: "Status") -> str:
    failed = [condition.message for condition in status.conditions if condition.type == "Failed" and condition.message]
    paused = [f"paused by {', '.join(lease.owner for lease in status.pauses)}"] if status.pauses else []
    restarts = [f"{status.restarts} restarts"] if status.restarts else []
    return "; ".join([*failed, *paused, *restarts])


def _worker_row(worker: "Worker", *, is_stale: bool) -> Row:
    return Row(
        job=f"  {worker.id}",
        phase=worker.phase,
        fps=f"{worker.per_second:,.0f}",
        frames=f"{worker.frames:,}",
        version=f"{worker.version}" if worker.version >= 0 else _NOTHING,
        behind=f"{worker.lag}",
        note=f"attempt {worker.attempt}" if worker.attempt else "",
        is_stale=is_stale,
    )


def _sum_row(answering: "Sequence[Status]", num_jobs: int) -> Row:
    return Row(
        job=f"{num_jobs} jobs",
        phase=f"{len(answering)} answer",
        fps=f"{sum(status.frames.per_second for status in answering):,.0f}",
        frames=f"{sum(status.frames.collected for status in answering):,}",
        workers=_workers_of(answering),
    )


def _workers_of(statuses: "Sequence[Status]") -> str:
    groups = [group for status in statuses for group in status.groups]
    return f"{sum(group.ready for group in groups)}/{sum(group.desired for group in groups)}"


def _document(entry: Entry) -> dict[str, object]:
    reading = entry.reading
    return {
        "name": entry.name,
        "error": entry.error,
        "status": reading.status.model_dump(mode="json") if reading is not None else None,
        "workers": [worker.model_dump(mode="json") for worker in reading.workers] if reading is not None else [],
    }
