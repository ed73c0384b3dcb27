"""Jobs that a command looks at side by side: heads that are asked again and again, and what is known of each job.

Heads of URLs come by way of `Board`, jobs of a cluster by way of `census.py`, both as the same entries.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cormorant_cli.connection import Connection
from cormorant_cli.errors import BadInput, CliError

if TYPE_CHECKING:
    from cormorant_contract.rest.status import Status, Worker, Workers

RETRY_S = 2.0
"""From a failure to the next connection."""
_CLOSE_S = 2.0


class HeadClient(Protocol):
    """What is asked of a head: `cormorant_client.Client` answers it."""

    def status(self) -> "Status": ...

    def workers(self) -> "Workers": ...


OpenHead = Callable[[], AbstractContextManager[HeadClient]]
"""A client of one head. Raises CliError with a sentence, on the way there and inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One row of the table: a job as the cluster or its head reports it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    status: "Status"
    workers: "tuple[Worker, ...]" = ()
    """Empty where they were not asked for."""
    read_at: float = field(default_factory=time.monotonic)
    """When, by this machine's monotonic clock."""

    @property
    def figures(self) -> Figures:
        frames, weights, groups = self.status.frames, self.status.weights, self.status.groups
        return Figures(
            phase=self.status.phase,
            frames=frames.collected,
            target=frames.target or 0,
            per_second=frames.per_second,
            ready=sum(group.ready for group in groups),
            desired=sum(group.desired for group in groups),
            version=weights.version,
            min_applied_version=weights.min_applied_version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the operator wrote of a job of a cluster: a little old, and there also when no head answers."""

    namespace: str
    figures: Figures
    note: str
    """What else there is to say of it."""
    age_s: float | None
    """Since it was written last, which happens when something changed; None: not known."""
    is_stale: bool
    """The job should be collecting, but its counts are old: the operator is away."""
    status: Mapping[str, object]
    """All of it, as the API server sends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    name: str
    """What the job is called until its head has said its own name."""
    reading: Reading | None = None
    """The last one that came."""
    written: Written | None = None
    """Status in the API server; None: the job runs outside of a cluster."""
    error: str = ""
    """Why the newest one did not."""
    is_asked: bool = False
    """An answer of either kind has come."""

    @property
    def is_fresh(self) -> bool:
        """The head answers."""
        return self.reading is not None and not self.error


class AskedHead:
    """One head that a thread asks again and again, over one connection as long as it holds."""

    def __init__(self, open_head: OpenHead, changed: threading.Condition, *, workers: bool, interval_s: float) -> None:
        """Begin to ask.

        Args:
            changed: guards the fields below; notified at every answer.
            workers: ask for every worker, too.
            interval_s: between an answer and the next question; 0: ask once.
        """
        self.reading: Reading | None = None
        self.error = ""
        self.is_asked = False
        self._open_head, self._changed, self._has_workers = open_head, changed, workers
        self._interval_s = interval_s
        self._ended = threading.Event()
        # A daemon: a head that keeps its answer to itself does not hold up the end of the command.
        self._thread = threading.Thread(target=self._ask, name="top-head", daemon=True)
        self._thread.start()

    def entry(self, name: str, *, written: Written | None = None, late: str = "") -> Entry:
        """What is known. `late`: the error of a head that has not answered yet; empty: it has time."""
        error, is_asked = (self.error, True) if self.is_asked else (late, bool(late))
        return Entry(name=name, reading=self.reading, written=written, error=error, is_asked=is_asked)

    def end(self) -> None:
        self._ended.set()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _ask(self) -> None:
        while not self._ended.is_set():
            try:
                with self._open_head() as client:
                    while True:
                        status = client.status()
                        workers = client.workers().workers if self._has_workers else ()
                        self._hear(Reading(status=status, workers=workers), "")
                        if not self._interval_s or self._ended.wait(self._interval_s):
                            return
            except CliError as error:
                self._hear(self.reading, str(error))
            # Another connection reads the tokens again.
            if not self._interval_s or self._ended.wait(max(self._interval_s, RETRY_S)):
                return

    def _hear(self, reading: Reading | None, error: str) -> None:
        with self._changed:
            self.reading, self.error, self.is_asked = reading, error, True
            self._changed.notify_all()


def end_all(heads: Sequence[AskedHead]) -> None:
    """Ask no more, and leave the heads alone as far as answers come at once."""
    for head in heads:
        head.end()
    deadline = time.monotonic() + _CLOSE_S
    for head in heads:
        head.join(deadline)


def url_heads(urls: Sequence[str], *, token: str, token_files: Sequence[str], ca_file: str = "") -> dict[str, OpenHead]:
    """The heads of URLs, by URL.

    Args:
        token: for all of them; empty: the token files.
        token_files: one for all, one for each URL in the same order, or none.

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
    return {
        url: partial(Connection(url=url, token=token, token_file=file, ca_file=ca_file).client, "read")
        for url, file in zip(urls, files, strict=True)
    }


class Board:
    """Heads of URLs. One that does not answer delays no other."""

    notice = ""
    """Nothing is to be said of all of them."""

    def __init__(self, heads: Mapping[str, OpenHead], *, workers: bool = False, interval_s: float) -> None:
        """Begin to ask, see `AskedHead`. `heads`: by name, in the order in which they are shown."""
        self._changed = threading.Condition()
        self._heads = {
            name: AskedHead(open_head, self._changed, workers=workers, interval_s=interval_s)
            for name, open_head in heads.items()
        }

    def wait(self, timeout_s: float) -> tuple[Entry, ...]:
        """Wait until every head was asked; those that have not answered by then say so in their error."""
        with self._changed:
            self._changed.wait_for(lambda: all(head.is_asked for head in self._heads.values()), timeout_s)
            late = f"no answer within {timeout_s:g} s"
            return tuple(head.entry(name, late=late) for name, head in self._heads.items())

    def entries(self) -> tuple[Entry, ...]:
        with self._changed:
            return tuple(head.entry(name) for name, head in self._heads.items())

    def close(self) -> None:
        for head in self._heads.values():
            head.end()
