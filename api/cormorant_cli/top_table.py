"""The table of `cormorant top`: entries in, rows out, and rows as text."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from cormorant_cli.jobs import age
from cormorant_cli.printing import columns_of
from cormorant_cli.sources import Entry, Figures, Reading, Written

if TYPE_CHECKING:
    from cormorant_contract.rest.status import Status, Worker

_HEADINGS = ("JOB", "PHASE", "FRAMES/S", "FRAMES", "WORKERS", "VERSION", "BEHIND", "RETURN", "QUEUE", "AS OF", "NOTE")
NUMBERS = frozenset({"FRAMES/S", "FRAMES", "WORKERS", "VERSION", "BEHIND", "RETURN", "QUEUE", "AS OF"})
_OPTIONAL = frozenset({"RETURN", "QUEUE", "AS OF"})
"""Columns that are left out where no row has a word for them: no operator knows returns."""
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
    as_of: str = ""
    """How old the facts are."""
    note: str = ""
    is_stale: bool = False
    """The head does not answer: this is what it said last."""

    @property
    def cells(self) -> tuple[str, ...]:
        """One for each heading, each in one line."""
        note = " ".join(self.note.split())
        return (
            self.job, self.phase, self.fps, self.frames, self.workers,
            self.version, self.behind, self.mean_return, self.queue, self.as_of, note,
        )  # fmt: skip


def rows_of(entries: Sequence[Entry]) -> Iterator[Row]:
    """The table, a row a job, its workers below it where they are known; at the end the sum of several jobs."""
    for entry in entries:
        reading = entry.reading
        if entry.written is not None and (reading is None or entry.error):
            yield _written_row(entry.name, entry.written, error=entry.error if entry.is_asked else "asking its head")
            continue
        if reading is None:
            note = entry.error if entry.is_asked else "asking"
            yield Row(job=entry.name, phase="Unreachable" if entry.error else _NOTHING, note=note)
            continue
        row = _job_row(reading, error=entry.error)
        if entry.written is not None:
            row = replace(row, job=entry.name, as_of=_age(time.monotonic() - reading.read_at))
        yield row
        for worker in reading.workers:
            yield _worker_row(worker, is_stale=bool(entry.error))
    if len(entries) > 1:
        yield _sum_row(entries)


def cut(rows: Sequence[Row], most: int) -> list[Row]:
    """As many rows as there is room for: the first, how many are left out, and the last, the sum of several jobs."""
    if len(rows) <= most:
        return list(rows)
    shown = max(1, most - 2)
    return [*rows[:shown], Row(job=f"{len(rows) - shown - 1} more lines", phase=""), rows[-1]]


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table as plain text, columns aligned."""
    headings, lines = columns(rows)
    numbers = [column for column, heading in enumerate(headings) if heading in NUMBERS]
    return columns_of([headings, *lines], gap="  ", numbers=numbers).split("\n")


def columns(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings, and the cells of each row, without the columns that say nothing."""
    table = [row.cells for row in rows]
    kept = [i for i, head in enumerate(_HEADINGS) if head not in _OPTIONAL or any(cells[i] for cells in table)]
    return tuple(_HEADINGS[i] for i in kept), [tuple(cells[i] for i in kept) for cells in table]


def _row_of(figures: Figures, *, job: str, **said: Any) -> Row:
    """The columns that every job has; `said`: the others."""
    share = f" ({min(1.0, figures.frames / figures.target):.0%})" if figures.target else ""
    return replace(
        Row(
            job=job,
            phase=figures.phase,
            fps=f"{figures.per_second:,.0f}",
            frames=f"{figures.frames:,}{share}",
            workers=f"{figures.ready}/{figures.desired}",
            version=f"{figures.version}",
            behind=f"{max(0, figures.version - figures.min_applied_version)}",
        ),
        **said,
    )


def _written_row(name: str, written: Written, *, error: str) -> Row:
    if not written.figures.phase:
        return Row(job=name, phase=_NOTHING, note="; ".join(filter(None, (written.note, error))))
    away = "its status is too old: is the operator running (`cormorant doctor`)?" if written.is_stale else ""
    return _row_of(
        written.figures,
        job=name,
        as_of=_age(written.age_s) if written.age_s is not None else _NOTHING,
        note="; ".join(filter(None, (away, written.note, error))),
        is_stale=written.is_stale,
    )


def _age(seconds: float) -> str:
    now = datetime.now(UTC)
    return age(now - timedelta(seconds=seconds), now)


def _job_row(reading: Reading, *, error: str) -> Row:
    status, mean_return, queue = reading.status, reading.status.episodes.mean_return, reading.status.queue
    row = _row_of(
        reading.figures,
        job=f"{status.namespace}/{status.job}" if status.namespace not in ("", "default") else status.job,
        mean_return=f"{mean_return:.2f}" if mean_return is not None else _NOTHING,
        queue=f"{queue.filled}/{queue.capacity}" if queue.capacity else _NOTHING,
        note=error or _note_of(status),
        is_stale=bool(error),
    )
    return replace(row, phase="Unreachable") if error else row


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


def _sum_row(entries: Sequence[Entry]) -> Row:
    """Sums of what heads say that answer, and of what the operator wrote of other jobs; an old rate counts nothing."""
    said = [entry.reading.figures for entry in entries if entry.reading is not None and entry.is_fresh]
    written = [entry.written for entry in entries if entry.written is not None and not entry.is_fresh]
    rates = [figures.per_second for figures in said]
    rates += [0.0 if known.is_stale else known.figures.per_second for known in written]
    figures = [*said, *(known.figures for known in written)]
    is_cluster = any(entry.written is not None for entry in entries)
    return Row(
        job=f"{len(entries)} jobs",
        phase=f"{sum(rate > 0 for rate in rates)} moving" if is_cluster else f"{len(said)} answer",
        fps=f"{sum(rates):,.0f}",
        frames=f"{sum(known.frames for known in figures):,}",
        workers=f"{sum(known.ready for known in figures)}/{sum(known.desired for known in figures)}",
    )
