"""Output shared by commands: results (`--json`), columns, counts and sizes."""

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import typer
from pydantic_core import to_jsonable_python

RECENT_EPISODES = 100
"""Number of episodes whose returns and lengths a fleet keeps."""
_SLOW_S = 3.0
_SPEAKS_JSON = ContextVar("speaks_json", default=False)


def speak_json(is_asked: bool) -> None:
    """Set the format of results and errors from now on."""
    _SPEAKS_JSON.set(is_asked)


def speaks_json() -> bool:
    return _SPEAKS_JSON.get()


def say_end(sentence: str, code: int) -> int:
    """Print on stderr why a command ended; with --json, as an object with its exit code. Returns the code."""
    typer.echo(json.dumps({"error": sentence, "exit_code": code}) if speaks_json() else sentence, err=True)
    return code


def tell(document: object, *lines: str, indent: int | None = 2) -> None:
    """Print a result: the document with `--json`, else the lines. `indent` None: one line, for JSON Lines."""
    if speaks_json():
        plain = to_jsonable_python(document, by_alias=False)
        lines = (json.dumps(plain, indent=indent, ensure_ascii=False),)
    for line in lines:
        typer.echo(line)


@contextmanager
def told_when_slow(what: str, *, after_s: float = _SLOW_S) -> Iterator[None]:
    """If the block takes longer than this, print once on stderr what it waits for: waiting must not look like
    hanging.
    """
    timer = threading.Timer(after_s, typer.echo, [f"waiting {what}"], {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def columns_of(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as aligned text."""
    lines = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("   ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(padded)


def size_of(size_bytes: float) -> str:
    """A human-readable size in binary units."""
    if size_bytes < 1024:
        return counted(int(size_bytes), "byte")
    size = size_bytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 shard", "2,048 frames"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
