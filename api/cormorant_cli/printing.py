"""What several commands print: objects of a cluster (`-o json|yaml|name`), columns, counts and sizes."""

import json
import logging
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import typer
import yaml

from cormorant_cli.cluster import Raw

RECENT_EPISODES = 100
"""Episodes that a fleet keeps returns and lengths of."""
_SLOW_S = 3.0
Output = Literal["table", "json", "yaml", "name"]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]


@contextmanager
def told_when_slow(what: str, *, after_s: float = _SLOW_S) -> Iterator[None]:
    """Print what is waited for on stderr, once, if the body takes longer: waiting must not look like hanging."""
    timer = threading.Timer(after_s, typer.echo, [f"waiting {what}"], {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show_objects(found: Sequence[Raw], output: Output) -> str:
    """Jobs in JSON, YAML or by name, without the API server's bookkeeping; several as a List."""
    if output == "name":
        return "\n".join(f"collectorjob.cormorant.dev/{raw['metadata']['name']}" for raw in found)
    bare = [
        {**raw, "metadata": {key: value for key, value in raw["metadata"].items() if key != "managedFields"}}
        for raw in found
    ]
    document = {"apiVersion": "v1", "kind": "List", "items": bare} if len(bare) > 1 else bare[0]
    if output == "json":
        return json.dumps(document, indent=2)
    return yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True).rstrip("\n")


def columns_of(rows: Iterable[Sequence[str]], *, numbers: Collection[int] = ()) -> str:
    """Rows of cells as aligned text. `numbers`: columns that are aligned on the right."""
    lines = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "   ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return "\n".join(map(str.rstrip, padded))


def size_of(size_bytes: float) -> str:
    """A size as people read it, in binary units."""
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


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Inside, warnings and errors of the fleet go to standard error, and nothing else."""
    import structlog

    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)
