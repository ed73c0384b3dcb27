"""Jobs that a command looks at side by side: where each is asked, and what it said last.

A `Source` is a head that is asked by its URL. Jobs of a cluster come by way of `census.py`, as the same entries.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cormorant_cli.connection import Connection
from cormorant_cli.errors import BadInput, CliError

if TYPE_CHECKING:
    from cormorant_contract.rest.status import Status, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    status: "Status"
    workers: "tuple[Worker, ...]" = ()
    """Empty where they were not asked for."""
    read_at: float = field(default_factory=time.monotonic)
    """When, by this machine's monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the operator wrote of a job of a cluster: a little old, and there also when no head answers."""

    namespace: str
    phase: str
    """Empty: no operator has seen the job."""
    frames: int
    target: int
    """0: none."""
    per_second: float
    ready: int
    """Workers, over all groups."""
    desired: int
    version: int
    min_applied_version: int
    note: str
    """What else there is to say of it."""
    age_s: float | None
    """Since it was written last, which happens when something changed; None: not known."""
    is_stale: bool
    """The job should be collecting, but its counts are old: the operator is away."""
    status: Mapping[str, object]
    """All of it, as the API server sends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    """What it is called until it has said its own name."""
    fetch: Callable[[], Reading]
    """Asks it; may take seconds. Raises CliError with a sentence. Called by one thread at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    name: str
    reading: Reading | None = None
    """The last one that came."""
    written: Written | None = None
    """Status in the API server; None: the job runs outside of a cluster."""
    error: str = ""
    """Why the newest one did not."""
    is_asked: bool = False
    """An answer of either kind has come."""


def url_sources(
    urls: Sequence[str], *, token: str, token_files: Sequence[str], workers: bool, ca_file: str = ""
) -> tuple[Source, ...]:
    """A source for each URL.

    Args:
        urls: of heads.
        token: for all of them; empty: the token files.
        token_files: one for all, one for each URL in the same order, or none.
        workers: ask for every worker, too.
        ca_file: certificates to trust with https; empty: the system's.

    Raises:
        BadInput: there are no URLs, or the token files do not fit.
    """
    if not urls:
        raise BadInput("no head given; use --url (once per job) or set CORMORANT_URL")
    if len(token_files) not in (0, 1, len(urls)):
        raise BadInput(
            f"{len(token_files)} token files for {len(urls)} URLs; give one for all, or one per URL in the same order"
        )
    files = list(token_files) * len(urls) if len(token_files) == 1 else list(token_files) or [""] * len(urls)
    return tuple(
        Source(name=url, fetch=_fetcher(connection, workers=workers))
        for url, file in zip(urls, files, strict=True)
        for connection in [Connection(url=url, token=token, token_file=file, ca_file=ca_file)]
    )


def _fetcher(connection: Connection, *, workers: bool) -> Callable[[], Reading]:
    def fetch() -> Reading:
        # Each time: a head that was started again may have other tokens in the same file.
        with connection.client("read") as client:
            status = client.status()
            return Reading(status=status, workers=client.workers().workers if workers else ())

    return fetch


class Board:
    """The newest reading of every source. One thread per source: one that does not answer delays no other."""

    notice = ""
    """Nothing is to be said of all of them."""

    def __init__(self, sources: Sequence[Source], *, interval_s: float) -> None:
        """Begin to ask.

        Args:
            sources: in the order in which they are shown.
            interval_s: between an answer and the next question; 0: ask once.
        """
        self._changed = threading.Condition()
        """Guards `_entries`; notified at every answer."""
        self._entries = [Entry(name=source.name) for source in sources]
        self._interval_s = interval_s
        self._closed = threading.Event()
        for place, source in enumerate(sources):
            # Daemons: a head that keeps its answer to itself does not hold up the end of the command.
            threading.Thread(target=self._ask, args=(place, source), name=f"top-{place}", daemon=True).start()

    def wait(self, timeout_s: float) -> tuple[Entry, ...]:
        """Wait until every source was asked; those that have not answered by then say so in their error."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: all(entry.is_asked for entry in self._entries), deadline - time.monotonic())
            late = f"no answer within {timeout_s:g} s"
            return tuple(
                entry if entry.is_asked else Entry(name=entry.name, error=late, is_asked=True)
                for entry in self._entries
            )

    def entries(self) -> tuple[Entry, ...]:
        with self._changed:
            return tuple(self._entries)

    def close(self) -> None:
        self._closed.set()

    def _ask(self, place: int, source: Source) -> None:
        while not self._closed.is_set():
            reading, error = self._entries[place].reading, ""
            try:
                reading = source.fetch()
            except CliError as failure:
                error = str(failure)
            with self._changed:
                self._entries[place] = Entry(name=source.name, reading=reading, error=error, is_asked=True)
                self._changed.notify_all()
            if not self._interval_s or self._closed.wait(self._interval_s):
                return
