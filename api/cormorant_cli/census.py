"""Jobs of a cluster side by side: what the operator wrote of each, and of a few what their heads say now.

    one list every few seconds        API server ──> Census ──entries──> `top`
    one forwarded port for a head     heads ───────> Census              MOST_HEADS of them at most

The list is enough for hundreds of jobs and needs no right but to read them; the operator writes counters every 15 s.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from cormorant_cli.errors import CliError, ObjectMissing
from cormorant_cli.jobs import condition, holds, identity, is_current, read_time
from cormorant_cli.sources import AskedHead, Entry, Figures, HeadClient, Written, end_all

if TYPE_CHECKING:
    from cormorant_cli.cluster import Cluster, Raw

MOST_HEADS = 8
"""Heads that are asked at a time: each is a connection through the API server."""
STALE_S = 60.0
"""The operator writes what moves every 15 s; a while longer, and it is away."""
LIST_S = 5.0
"""Between two lists at least: they say nothing new more often."""
_CLOSE_S = 2.0
_ENDS = ("Completed", "Failed")
_BEGINNINGS = ("Pending", "Starting", "Restarting", "Degraded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    namespace: str
    """Empty: of all namespaces."""
    names: tuple[str, ...] = ()
    """Empty: all jobs."""

    def words(self) -> str:
        return f"namespace {self.namespace}" if self.namespace else "the cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    open_head: Callable[["Raw"], AbstractContextManager[HeadClient]]
    """A client of a job's head, as `OpenHead` of one head."""
    workers: bool
    """For every worker, too."""


@dataclass(slots=True)
class _Seen:
    """What the last looks found."""

    jobs: dict[str, "Raw"] = field(default_factory=dict)
    """By name as it is shown, in the order in which they are shown."""
    missing: dict[str, str] = field(default_factory=dict)
    """Named jobs that are gone, and the sentence for it."""
    time: datetime | None = None
    """The API server's, at the list."""
    read_at: float = 0.0
    """The same moment on this machine's monotonic clock."""


class Census:
    """The newest of every job. One thread lists, one a head asks it."""

    def __init__(self, cluster: "Cluster", scope: Scope, *, asking: Asking | None, interval_s: float) -> None:
        """Look once, and begin to look again.

        Args:
            cluster: closed by the caller, after `close`.
            asking: of heads; None: the list is all.
            interval_s: between two questions to a head, and at least LIST_S between two lists; 0: ask once.

        Raises:
            CliError: the cluster refuses, there is no such namespace, or a named job is not there.
        """
        self._cluster, self._scope, self._asking, self._interval_s = cluster, scope, asking, interval_s
        self._changed = threading.Condition()
        """Guards `_seen`, `_heads`, what they hold, and `_notice`; notified at every answer of a head."""
        self._seen = _Seen()
        self._heads: dict[str, AskedHead] = {}
        """By the job's uid."""
        self._notice = ""
        self._closed = threading.Event()
        # What is wrong at once is for the user to put right: a name, a right, the kubeconfig.
        self._take(self._find())
        if not self._seen.jobs and scope.namespace:
            cluster.refuse_namespace(scope.namespace)
        self._lister = threading.Thread(target=self._list, name="top-list", daemon=True)
        if interval_s:
            self._lister.start()

    @property
    def notice(self) -> str:
        """What is to be said of all jobs, as a sentence; empty when nothing is."""
        with self._changed:
            if self._notice:
                return f"this list is {time.monotonic() - self._seen.read_at:.0f} s old: {self._notice}"
            if not self._seen.jobs and not self._seen.missing:
                elsewhere = "; -A shows those of all namespaces" if self._scope.namespace else ""
                return f"there are no jobs in {self._scope.words()}{elsewhere}"
            return ""

    def wait(self, timeout_s: float) -> tuple[Entry, ...]:
        """Wait until every head was asked; those that have not answered by then say so in their error."""
        with self._changed:
            self._changed.wait_for(lambda: all(head.is_asked for head in self._heads.values()), timeout_s)
            return tuple(self._entries(late=f"no answer from its head within {timeout_s:g} s"))

    def entries(self) -> tuple[Entry, ...]:
        with self._changed:
            return tuple(self._entries(late=""))

    def close(self) -> None:
        """Ask no more, and leave the cluster alone as far as answers come at once."""
        self._closed.set()
        with self._changed:
            heads = list(self._heads.values())
        end_all(heads)
        if self._lister.is_alive():
            self._lister.join(_CLOSE_S)

    # -- the list ----------------------------------------------------------------------------------------------

    def _list(self) -> None:
        while not self._closed.wait(max(self._interval_s, LIST_S)):
            try:
                found = self._find()
            except CliError as error:
                with self._changed:
                    self._notice = str(error)
                continue
            self._take(found)

    def _find(self) -> _Seen:
        scope, found, missing = self._scope, [], {}
        if not scope.names:
            found = self._cluster.objects("CollectorJob", namespace=scope.namespace)
        for name in scope.names:
            try:
                found.append(self._cluster.get("CollectorJob", name, namespace=scope.namespace))
            except ObjectMissing as error:
                if name not in self._seen.jobs and name not in self._seen.missing:
                    raise  # a name that never was
                missing[name] = str(error)
        if not scope.names:
            found.sort(key=lambda job: (_has_ended(job), identity(job)))
        jobs = {job["metadata"]["name"] if scope.namespace else identity(job): job for job in found}
        return _Seen(jobs, missing, self._cluster.now, time.monotonic())

    def _take(self, found: _Seen) -> None:
        with self._changed:
            self._seen, self._notice = found, ""
            if self._asking is None or self._closed.is_set():
                return
            asked = {job["metadata"]["uid"]: job for job in found.jobs.values() if _may_have_head(job)}
            for uid in self._heads.keys() - asked.keys():
                self._heads.pop(uid).end()  # another one's turn
            for uid in [uid for uid in asked if uid not in self._heads][: MOST_HEADS - len(self._heads)]:
                open_head = partial(self._open_head, self._asking, asked[uid])
                self._heads[uid] = AskedHead(
                    open_head, self._changed, workers=self._asking.workers, interval_s=self._interval_s
                )

    def _open_head(self, asking: Asking, job: "Raw") -> AbstractContextManager[HeadClient]:
        """To the job as it was listed last."""
        uid = job["metadata"]["uid"]
        with self._changed:
            listed = next((new for new in self._seen.jobs.values() if new["metadata"]["uid"] == uid), job)
        return asking.open_head(listed)

    # -- both --------------------------------------------------------------------------------------------------

    def _entries(self, *, late: str) -> Iterator[Entry]:
        since_s = time.monotonic() - self._seen.read_at
        for name, job in self._seen.jobs.items():
            written = read_written(job, now=self._seen.time, options=self._cluster.options_of(job))
            if written.age_s is not None:
                written = replace(written, age_s=written.age_s + since_s)
            head = self._heads.get(job["metadata"]["uid"])
            if head is not None:
                yield head.entry(name, written=written, late=late)
                continue
            is_left_out = self._asking is not None and _may_have_head(job)
            error = f"its head is not asked: at most {MOST_HEADS} heads are asked at a time; name this job"
            yield Entry(name=name, written=written, error=error if is_left_out else "", is_asked=True)
        for name, sentence in self._seen.missing.items():
            yield Entry(name=name, error=sentence, is_asked=True)


def read_written(job: "Raw", *, now: datetime | None, options: str = "") -> Written:
    """What the operator wrote of a job. `now`: the API server's clock; None: ages are not known."""
    status = job.get("status") or {}
    frames, weights = status.get("frames") or {}, status.get("weights") or {}
    groups: Sequence[Raw] = status.get("groups") or ()
    per_second = float(frames.get("perSecond") or 0.0)
    age_s = _age_s(job, now)
    return Written(
        namespace=job["metadata"]["namespace"],
        figures=Figures(
            phase=str(status.get("phase") or ""),
            frames=int(frames.get("collected") or 0),
            target=int(frames.get("target") or 0),
            per_second=per_second,
            ready=sum(int(group.get("ready") or 0) for group in groups),
            desired=sum(int(group.get("desired") or 0) for group in groups),
            version=int(weights.get("version") or 0),
            min_applied_version=int(weights.get("minAppliedVersion") or 0),
        ),
        note="; ".join(_notes(job, options)),
        age_s=age_s,
        is_stale=per_second > 0 and age_s is not None and age_s > STALE_S,
        status=status,
    )


def _age_s(job: "Raw", now: datetime | None) -> float | None:
    """Since the status was written last: the API server notes when an owner changed its fields."""
    moments = [
        read_time(entry["time"])
        for entry in job["metadata"].get("managedFields") or ()
        if entry.get("subresource") == "status" and entry.get("time")
    ]
    if now is None or not moments or not (job.get("status") or {}).get("phase"):
        return None
    return max(0.0, (now - max(moments)).total_seconds())


def _notes(job: "Raw", options: str) -> Iterator[str]:
    """Why it is as it is, where the phase does not say it."""
    status = job.get("status") or {}
    if not status.get("phase"):
        yield f"not reconciled by any operator; see `cormorant doctor {job['metadata']['name']}{options}`"
        return
    phase = status["phase"]
    facts = [condition(job, kind) for kind in ("Failed", "Stalled", "Suspended") if holds(job, kind)]
    facts += [fact for fact in (condition(job, "Accepted"),) if fact.get("status") == "False"]
    facts += [fact for fact in (condition(job, "Progressing"),) if fact.get("status") == "Unknown"]
    if phase in _BEGINNINGS and condition(job, "Ready").get("status") == "False":
        facts.append(condition(job, "Ready"))
    yield from dict.fromkeys(str(fact.get("message") or fact.get("reason") or fact["type"]) for fact in facts)
    if not is_current(job):
        yield "the operator has not reconciled its newest spec"
    groups: Sequence[Raw] = status.get("groups") or ()
    restarts = int(status.get("headRestarts") or 0) + sum(int(group.get("restarts") or 0) for group in groups)
    if restarts:
        yield f"{restarts} restarts"


def _has_ended(job: "Raw") -> bool:
    return any(holds(job, kind) for kind in _ENDS)


def _may_have_head(job: "Raw") -> bool:
    """Whether it is worth asking; a job that no operator has seen is not."""
    return bool((job.get("status") or {}).get("phase")) and not _has_ended(job) and not holds(job, "Suspended")
